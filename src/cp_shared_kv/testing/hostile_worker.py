"""A whole rank worker, model and shared memory included, whose controller also sends mutants."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from cp_shared_kv.demo_model.cache import demo_checkpoint_directory
from cp_shared_kv.engine.batch import Batch, BatchRequest
from cp_shared_kv.engine.codecs import TO_RANK, encode
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ConnectDecode, DisconnectDecode
from cp_shared_kv.engine.model_spec import describe_model
from cp_shared_kv.engine.prefill_process import first_configuration
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.sizing import resolve_limits
from cp_shared_kv.engine.worker import RankWorker
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.memory.buffers import SharedMemoryBuffer
from cp_shared_kv.memory.page_format import PAGE_KINDS
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.testing.calls_at_once import CallsAtOnce
from cp_shared_kv.testing.mutations import Mutator
from cp_shared_kv.transfer.codec import pack_int64, unpack_int64
from cp_shared_kv.transfer.messages import AbortRoom, Acknowledged, OpenRoom
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.sampling_params import SamplingParams

PAGE_SIZE, PAGES = 16, 8
DECODE_EPOCH = 200
GROUP, DECODE = Life("prefill", 0, 1), Life("decode", 0, 1)


class HostileWorker:
    """The only rank of a group, and the memory of the decode worker that it sends to.

    A mutant that the rank refuses would end its process. Here the rank goes on, which asks for
    more: whatever it has refused must have changed nothing that harms what follows.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._chance = random.Random(f"worker {seed}")  # noqa: S311  (repeatable)
        self._mutator = Mutator(self._chance)
        self.mutants = self.refused = 0
        config = EngineConfig(
            model_path=demo_checkpoint_directory(),
            page_size=PAGE_SIZE,
            max_total_tokens=PAGES * PAGE_SIZE,
            chunked_prefill_size=PAGE_SIZE,
            context_length=PAGES * PAGE_SIZE,
        )
        model = describe_model(config)
        limits = resolve_limits(config, model.pool_spec, model.context_length, free_bytes=1 << 30)
        self._spec = RunSpec(
            run_id=f"hostile{os.getpid()}",
            run_dir=str(directory),
            supervisor_pid=os.getpid(),
            config=config.as_plain(),
            limits=limits,
            page_layout=model.page_layout,
            model_fingerprint=model.fingerprint,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
        )
        pool_bytes = model.pool_spec.pool_bytes(PAGES)
        name = self._spec.region_name(DECODE, "pool", DECODE_EPOCH)
        self._memory = SharedMemoryBuffer.create(name, pool_bytes)
        self._decode_pool = KVPool(model.pool_spec, PAGES, self._memory)
        self._worker = RankWorker(
            self._spec,
            GROUP,
            model,
            Transformer.load(config.model_path, model.compute_dtype),
            SoloGroup(),
            CallsAtOnce(),
        )
        self._configure = first_configuration(self._spec)
        self._connect = ConnectDecode(
            address=self._spec.endpoints.inbox(DECODE),
            hello=self._spec.hello(
                role="decode",
                epoch=DECODE_EPOCH,
                session_id="decode",
                physical_pages=PAGES,
                regions=(Region(name, pool_bytes),),
            ),
        )
        self._worker.handle(self._configure)
        self._room = self._batch_id = 0
        self._reserved: dict[int, set[int]] = {}
        """By room, those that only a mutant has opened included."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for link in (self._worker.controller, *self._worker.decodes.all()):
            link.close()
        self._memory.unlink()

    def one_room(self) -> None:
        """One prompt in two chunks, with mutants among its messages; then the memory is looked at.

        AssertionError if decode's memory has changed outside what the room was opened with.
        """
        self._room += 1
        self._memory.tensor.zero_()
        for message in self._messages():
            data = encode(message)
            mutants = [self._mutator.mutate(data) for _ in range(self._chance.choice((0, 1, 2)))]
            before = self._chance.randint(0, len(mutants))
            for mutant in mutants[:before]:
                self._hear_mutant(mutant)
            self._hear(data)
            for mutant in mutants[before:]:
                self._hear_mutant(mutant)
        reserved = set[int]().union(*self._reserved.values())
        for kind in PAGE_KINDS:
            for layer in self._decode_pool.spec.layers(kind):
                rows = self._decode_pool.pages(kind, layer).numpy()
                written = set(np.flatnonzero(rows.any(axis=1)).tolist())
                assert written <= reserved, f"{written} written, {reserved} reserved"
        self._reserved.pop(self._room, None)
        self._acknowledge()
        self._worker.look_after_transfers()

    def _messages(self) -> list[msgspec.Struct]:
        chance = self._chance
        tokens = chance.randint(PAGE_SIZE + 1, 2 * PAGE_SIZE)
        destinations = chance.sample(range(1, PAGES + 1), 2)
        pages = np.array(chance.sample(range(1, PAGES + 1), 2), np.int64)
        sampling = SamplingParams(
            temperature=chance.choice((0.0, 0.7)),
            top_k=chance.choice((0, 5)),
            repetition_penalty=chance.choice((1.0, 1.1)),
            logit_bias=((3, 1.0),),
            logprobs=chance.choice((None, 2)),
        )
        ends = {"epoch": self._configure.epoch, "peer_epoch": DECODE_EPOCH, "room": self._room}
        opened = OpenRoom(
            epoch=self._configure.epoch,
            room=self._room,
            decode_epoch=DECODE_EPOCH,
            first_position=0,
            physical_pages=pack_int64(np.array(destinations, np.int64)),
            total_positions=2,
            sampling=sampling,
            prompt_token_ids=pack_int64(np.arange(5)) if sampling.repetition_penalty != 1 else b"",
        )
        batches = [
            self._batch(pages, start, stop, last=stop == tokens)
            for start, stop in ((0, PAGE_SIZE), (PAGE_SIZE, tokens))
        ]
        messages: list[msgspec.Struct] = [
            self._connect,
            opened,
            *batches,
            AbortRoom(**ends, reason="enough"),
        ]
        if chance.random() < 0.1:
            messages.append(DisconnectDecode(decode_epoch=DECODE_EPOCH, reason="it was killed"))
        return messages

    def _batch(self, pages: np.ndarray, start: int, stop: int, *, last: bool) -> Batch:
        self._batch_id += 1
        return Batch(
            epoch=self._configure.epoch,
            batch_id=self._batch_id,
            token_ids=pack_int64(np.arange(start, stop, dtype=np.int64)),
            requests=[
                BatchRequest(
                    room=self._room,
                    prefix_tokens=start,
                    new_tokens=stop - start,
                    logical_pages=pack_int64(pages[: -(-stop // PAGE_SIZE)]),
                    chunk=start // PAGE_SIZE,
                    send_start=start // PAGE_SIZE,
                    send_stop=-(-stop // PAGE_SIZE),
                    last=last,
                )
            ],
        )

    def _acknowledge(self) -> None:
        """Decode's answer, so that the rank forgets the room, unless a mutant has hidden it."""
        answer = Acknowledged(
            epoch=DECODE_EPOCH,
            peer_epoch=self._configure.epoch,
            room=self._room,
            rank=0,
            of="concluded",
        )
        with suppress(ProtocolError):
            self._worker.on_decode(encode(answer))

    def _hear_mutant(self, data: bytes) -> None:
        self.mutants += 1
        self.refused += not self._hear(data)

    def _hear(self, data: bytes) -> bool:
        """Whether it was obeyed."""
        try:
            message = TO_RANK.decode(data)
            if isinstance(message, OpenRoom):
                pages = set(unpack_int64(message.physical_pages).tolist())
                self._reserved[message.room] = self._reserved.get(message.room, set()) | pages
            self._worker.handle(message)
        except ProtocolError:
            return False
        return True
