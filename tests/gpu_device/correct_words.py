"""Compares small arrays that a kernel copies from host memory with their source, beside a wait for a word."""

import numpy as np
import torch

from caraserve.cpu.shared_memory import SharedRegion
from caraserve.gpu.driver.launch import wait_word
from caraserve.gpu.kernels import cuda_launch
from caraserve.util.units import align_up
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.results import WrongResult
from scripts.laboratory.gpu.setup import CheckSetup

_PIECES = ((300, 300, 300), (70, 1, 9), (64, 2, 5))  # words, words in a row, words between the starts of two rows
_TARGET_WORDS, _SOURCE_WORDS, _APART = 4096, 1024, 1000


def check_words(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks that arrays come to their rows and nowhere else, and that a wait for a word that is there ends."""
    region, driver = SharedRegion(1 << 14), acc.device.driver
    source, table = (region.carve(4096).view(dtype) for dtype in (np.int32, np.int64))
    source[:] = np.random.default_rng(case).integers(1, 1 << 30, _SOURCE_WORDS)
    target = torch.zeros(_TARGET_WORDS, dtype=torch.int32, device=acc.place)
    expected, at = np.zeros(_TARGET_WORDS, np.int32), 0
    base = driver.register_host(region.base, region.num_bytes)
    try:
        for index, (words, width, pitch) in enumerate(_PIECES):
            place = index * _APART + case % 4
            addresses = target.data_ptr() + 4 * place, base + 4 * at
            table[6 * index : 6 * index + 6] = (*addresses, words, width, 4 * pitch, 0)
            places = place + np.arange(words) // width * pitch + np.arange(words) % width
            expected[places] = source[at : at + words]
            at += align_up(words, 16)
        acc.settle()
        acc.launch(wait_word(base, int(source[0])))
        acc.launch(cuda_launch.scatter_words(base + region.offset(int(table.ctypes.data)), len(_PIECES)))
        acc.settle()
    finally:
        driver.unregister_host(region.base)
        region.close()
    if not np.array_equal(target.cpu().numpy(), expected):
        raise WrongResult(f"small arrays, case {case}: the device's words are not those of the host")
    return 0.0
