"""NVLink counters out of what nvidia-smi prints."""

from __future__ import annotations

from benchmarks.nvlink import between, counters

PRINTED = """GPU 0: NVIDIA H200 (UUID: GPU-1)
\t Link 0: Data Tx: 1000 KiB
\t Link 0: Data Rx: 10 KiB
\t Link 1: Data Tx: 24 KiB
\t Link 1: Data Rx: 6 KiB
GPU 1: NVIDIA H200 (UUID: GPU-2)
\t Link 0: Data Tx: 8 KiB
\t Link 0: Data Rx: 512 KiB
GPU 2: NVIDIA H200 (UUID: GPU-3)
"""


def test_links_are_summed_by_gpu_and_one_without_counters_is_left_out() -> None:
    assert counters(PRINTED) == {0: {"Tx": 1024, "Rx": 16}, 1: {"Tx": 8, "Rx": 512}}


def test_what_went_in_the_meantime_and_how_even_it_was() -> None:
    before = {0: {"Tx": 0, "Rx": 5}, 1: {"Tx": 0, "Rx": 5}}
    after = {0: {"Tx": 3, "Rx": 5}, 1: {"Tx": 1, "Rx": 5}}
    assert between(before, after) == {
        "sent_bytes": [3072, 1024],
        "busiest_over_mean_sent_bytes": 1.5,
        "received_bytes": [0, 0],
        "busiest_over_mean_received_bytes": None,
    }
    assert between(before, "no driver") == "no driver"
