"""The CUDA kernel that waits for a word, run on the CPU."""

from threading import Thread

import numpy as np
import pytest

from caraserve.gpu.driver.api import has_reached
from caraserve.gpu.kernels import cuda_launch
from tests.gpu.emulator import run
from tests.gpu.lora_case import address


@pytest.mark.parametrize(
    ("word", "value"), [(7, 7), (9, 7), (0, 2**32 - 1), (2**31 - 2, 2**32 - 1), (2**32 - 1, 2**31), (0, 0)]
)
def test_a_word_at_its_value_ends_the_wait_at_once(word: int, value: int) -> None:
    assert has_reached(word, value)
    run(cuda_launch.wait_word(address(words := np.array([word], np.uint32)), value))
    assert words[0] == word


@pytest.mark.parametrize(("before", "value", "after"), [(6, 7, 7), (2**32 - 2, 0, 1), (7, 2**31 + 6, 2**31 + 6)])
def test_the_kernel_waits_until_the_word_reaches_its_value(before: int, value: int, after: int) -> None:
    assert not has_reached(before, value)
    run(cuda_launch.wait_word(address(np.zeros(1, np.uint32)), 0))  # compiles the kernel first
    words = np.array([before], np.uint32)
    waiting = Thread(target=run, args=(cuda_launch.wait_word(address(words), value),), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    words[0] = after
    waiting.join(60)
    assert not waiting.is_alive()
