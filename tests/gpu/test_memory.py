"""The CUDA kernels that move bytes, run on the CPU."""

from threading import Thread

import numpy as np
import pytest

from caraserve.gpu import launches
from caraserve.gpu.driver import has_reached
from tests.gpu.emulator import run
from tests.gpu.lora_case import address

LAYERS, BLOCK_TOKENS, BLOCKS = 3, 16, 5


@pytest.mark.parametrize("token_bytes", [16, 48, 256])
@pytest.mark.parametrize("grid", [1, 4])
def test_keys_and_values_go_to_their_places_and_nowhere_else(token_bytes: int, grid: int) -> None:
    """Cache: [block, layer, keys and values, place in the block, bytes]."""
    rng = np.random.default_rng(token_bytes)
    cache = rng.integers(0, 255, (BLOCKS, LAYERS, 2, BLOCK_TOKENS, token_bytes), np.uint8)
    places = np.array([17, -1, 0, 79, 33, 18], np.int64)
    rows = rng.integers(0, 255, (len(places), 4 * token_bytes), np.uint8)  # queries before, something behind
    keys, values = rows[:, token_bytes : 2 * token_bytes], rows[:, 2 * token_bytes : 3 * token_bytes]
    expected, layer = cache.copy(), 1
    for place, key, value in zip(places, keys, values, strict=True):
        if place >= 0:
            expected[place // BLOCK_TOKENS, layer, :, place % BLOCK_TOKENS] = key, value
    in_layer = 2 * BLOCK_TOKENS * token_bytes
    launch = launches.kv_append(
        grid,
        address(keys),
        address(values),
        stride_bytes=rows.shape[1],
        places=address(places),
        tokens=len(places),
        token_bytes=token_bytes,
        block_tokens=BLOCK_TOKENS,
        block_bytes=LAYERS * in_layer,
        layer_offset=layer * in_layer,
        cache=address(cache),
    )
    run(launch, seed=3)
    assert (cache == expected).all()


def test_rectangles_are_moved_and_zeroed() -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(1, 255, 1 << 14, np.uint8)
    expected, base = memory.copy(), address(memory)
    moves = [  # target, its pitch, source, its pitch, width, rows
        (0, 64, 8192, 96, 48, 7),
        (1024, 2048, 12288, 2048, 2048, 1),
        (4096, 128, None, 0, 112, 5),
        (6144, 16, 6160, 16, 16, 0),
    ]
    table = np.zeros((len(moves), launches.MOVE_WORDS), np.int64)
    for index, (target, target_pitch, source, source_pitch, width, rows) in enumerate(moves):
        from_ = 0 if source is None else base + source
        table[index] = (base + target, target_pitch, from_, source_pitch, width, rows)
        for row in range(rows):
            at = target + row * target_pitch
            expected[at : at + width] = 0 if source is None else memory[source + row * source_pitch :][:width]
    count = np.array([len(moves)], np.int32)
    run(launches.pool_move(3, address(table), address(count)))
    assert (memory == expected).all()


@pytest.mark.parametrize(
    ("word", "value"), [(7, 7), (9, 7), (0, 2**32 - 1), (2**31 - 2, 2**32 - 1), (2**32 - 1, 2**31), (0, 0)]
)
def test_a_word_that_has_reached_its_value_is_not_waited_for(word: int, value: int) -> None:
    assert has_reached(word, value)
    run(launches.wait_word(address(words := np.array([word], np.uint32)), value))
    assert words[0] == word


@pytest.mark.parametrize(("before", "value", "after"), [(6, 7, 7), (2**32 - 2, 0, 1), (7, 2**31 + 6, 2**31 + 6)])
def test_a_word_is_waited_for_until_it_gets_there(before: int, value: int, after: int) -> None:
    assert not has_reached(before, value)
    run(launches.wait_word(address(np.zeros(1, np.uint32)), 0))  # compiled by now
    words = np.array([before], np.uint32)
    waiting = Thread(target=run, args=(launches.wait_word(address(words), value),), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    words[0] = after
    waiting.join(60)
    assert not waiting.is_alive()
