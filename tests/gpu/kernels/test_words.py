"""The CUDA kernels that wait for a word and that copy small arrays, run on the CPU."""

from threading import Thread

import numpy as np
import pytest

from caraserve.core.lora_layout import aligned_bytes
from caraserve.gpu.driver.api import has_reached
from caraserve.gpu.driver.launch import wait_word
from caraserve.gpu.kernels import cuda_launch
from caraserve.util.units import align_up
from tests.gpu.emulator import run
from tests.gpu.lora_case import address


@pytest.mark.parametrize(
    ("word", "value"), [(7, 7), (9, 7), (0, 2**32 - 1), (2**31 - 2, 2**32 - 1), (2**32 - 1, 2**31), (0, 0)]
)
def test_a_word_at_its_value_ends_the_wait_at_once(word: int, value: int) -> None:
    assert has_reached(word, value)
    run(wait_word(address(words := np.array([word], np.uint32)), value))
    assert words[0] == word


@pytest.mark.parametrize(("before", "value", "after"), [(6, 7, 7), (2**32 - 2, 0, 1), (7, 2**31 + 6, 2**31 + 6)])
def test_the_kernel_waits_until_the_word_reaches_its_value(before: int, value: int, after: int) -> None:
    assert not has_reached(before, value)
    run(wait_word(address(np.zeros(1, np.uint32)), 0))  # compiles the kernel first
    words = np.array([before], np.uint32)
    waiting = Thread(target=run, args=(wait_word(address(words), value),), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    words[0] = after
    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_pieces_are_copied_to_their_rows_and_nowhere_else(offset: int) -> None:
    """Whole arrays to aligned places and to others, and rows of one and two words."""
    rng, place = np.random.default_rng(0), 64 + offset
    source, target = aligned_bytes(1 << 15).view(np.int32), aligned_bytes(1 << 16).view(np.int32)
    source[:] = rng.integers(1, 1 << 30, source.size)
    target[:] = 0
    expected, table, at = target.copy(), [], 0
    for words, width, pitch in ((1024, 1024, 1024), (5, 1024, 1024), (1, 1, 9), (70, 1, 9), (64, 2, 5), (1023, 2, 3)):
        start = address(target) + 4 * place
        table += [start, address(source) + 4 * at, words, width, 4 * pitch, 0]
        for word in range(words):
            expected[place + word // width * pitch + word % width] = source[at + word]
        at, place = at + align_up(words, 16), place + words // width * pitch + 1024 + offset
    described = aligned_bytes(8 * len(table)).view(np.int64)
    described[:] = table
    run(cuda_launch.scatter_words(address(described), len(table) // 6))
    assert (target == expected).all()
