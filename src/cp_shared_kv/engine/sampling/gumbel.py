"""Draw a token by noise that depends on the seed, the output position and the token alone.

The largest of score + Gumbel noise is a draw from softmax(scores) (Gumbel-max; Maddison, Tarlow and
Minka 2014, arXiv 1411.0030). The noise comes from Philox4x64-10, a counter-based generator (Salmon
et al., SC 2011): nothing is carried from one draw to the next, so a draw is the same on any rank,
beside any other requests, and after any restart.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_WORD = (1 << 64) - 1
_LOW_BITS = np.uint64(12)
_UNIT = 2.0**-52


def draw(scores: npt.NDArray[np.float32], seed: int, position: int) -> int:
    """One token id from softmax(`scores`), float32[vocab] with -inf for what may not be drawn.

    `seed` is any 64-bit integer, signed or not, `position` the tokens of the output so far. Where
    all is -inf: the lowest id.
    """
    ids = np.flatnonzero(scores > -np.inf)
    if not len(ids):
        return 0
    noise = gumbel_noise(seed, position, ids)
    return int(ids[(noise + scores[ids]).argmax()])  # the first of equal ones: the lowest id


def gumbel_noise(
    seed: int, position: int, token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for each of `token_ids`, int64, ascending, one or more.

    Token v has word v of the generator's stream, whatever other tokens are asked for.
    """
    key = np.array([seed & _WORD, position], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(int(token_ids[-1]) + 1)[token_ids]
    # The middle of each of 2^52 equal steps: exact in float64, never 0 and never 1.
    noise = np.asarray(((words >> _LOW_BITS) + 0.5) * _UNIT, dtype=np.float64)
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise
