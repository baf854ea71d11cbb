"""Tokens equal those of peft in every loading mode, at any link speed, and whatever happens to the CPU workers."""

import asyncio
import contextlib
import os
import random
import signal

import pytest

from caraserve.config import LOADING_MODES, PRELOADED_MODES
from caraserve.cpu.backend import CpuBackend
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.loop import Engine
from tests.oracle.models import prompt_of
from tests.oracle.subject import Subject, make_subject
from tests.serving import MIB, engine_config, lora_config, model_config, running, submit

LAYERS = 2  # of the model
WORKER_CORES = tuple(sorted(os.sched_getaffinity(0)))  # more than one, so that prompts are cut into slices

SLOW_MB_PER_S, FAST_MB_PER_S = 4.0, 400.0


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("modes"))


def backend_of(engine: Engine) -> CpuBackend:
    backend = engine._backend
    assert isinstance(backend, CpuBackend)
    return backend


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [prompt_of(rng, rng.choice((1, 3, 17, 40, 100))) for _ in range(count)]


@pytest.mark.parametrize("mode", LOADING_MODES)
@pytest.mark.parametrize("link_mb_per_s", [SLOW_MB_PER_S, FAST_MB_PER_S])
async def test_every_mode_answers_like_peft(subject: Subject, mode: str, link_mb_per_s: float) -> None:
    """Cold and warm requests mixed, with a device cache of two or three adapters, so that adapters are evicted. In mode
    `assisted` the second of the two layers is copied first."""
    model, adapters, oracle = subject
    rng = random.Random(f"{mode} {link_mb_per_s}")
    asked = [(prompt, rng.choice([None, *adapters])) for prompt in prompts(rng, 24)]
    device_bytes = 64 * MIB if mode in PRELOADED_MODES else 600 * 1024
    groups = 2 if mode == "assisted" else None
    lora = lora_config(
        adapters, mode=mode, link_mb_per_s=link_mb_per_s, device_bytes=device_bytes, pipeline_groups=groups
    )
    async with running(model_config(model), lora, engine_config(step_tokens=64)) as engine:
        found = await asyncio.gather(*(submit(engine, *each, max_tokens=6) for each in asked))
    oracle.check_answers(asked, found)


async def test_workers_compute_what_has_not_arrived_each_a_slice_of_a_prompt(subject: Subject) -> None:
    """Over a link so slow that nothing arrives, workers compute every layer of every token. With --tokens-per-cpu 1
    every worker gets a slice of each layer of a prompt; a token to decode is one slice."""
    model, adapters, oracle = subject
    rng = random.Random(3)

    async def slices(tokens_per_cpu: int, wanted: int = 1) -> int:
        lora = lora_config(
            adapters, mode="assisted", link_mb_per_s=0.01, lora_cpus=WORKER_CORES, tokens_per_cpu=tokens_per_cpu
        )
        async with running(model_config(model), lora, engine_config()) as engine:
            backend = backend_of(engine)
            assert backend.workers.await_all(timeout_s=30)
            for _ in range(20):
                handed_off, redone = backend.slices_handed_off, backend.modules_redone
                prompt = prompt_of(rng, 100)
                answer = await submit(engine, prompt, "r64", max_tokens=4)
                oracle.check_greedy(prompt, "r64", answer.token_ids)
                assert backend.slices_handed_off > handed_off
                done = backend.slices_handed_off - handed_off
                # On a busy machine a late worker gets no slice of the next layers, and may be late for a while.
                if backend.modules_redone == redone and done >= wanted:
                    assert answer.finish.phases.cpu_layers == 4 * LAYERS  # a prefill and three decode steps
                    return done
        raise AssertionError("a worker was late in each of 20 requests")

    one_each = await slices(100)  # for each layer's groups of modules, of a prefill and three decode steps
    all_share = one_each + (len(WORKER_CORES) - 1) * one_each // 4
    assert await slices(1, all_share) == all_share


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_no_token_is_lost_when_workers_die_or_stop_in_a_layer(subject: Subject, blow: signal.Signals) -> None:
    """A worker is killed or stopped repeatedly while it computes; its slices are redone, and it is replaced."""
    model, adapters, oracle = subject
    lora = lora_config(adapters, mode="assisted", link_mb_per_s=0.01, lora_cpus=WORKER_CORES)
    rng = random.Random(2)
    asked = [(prompt, rng.choice(list(adapters))) for prompt in prompts(rng, 4)]

    async def strike(workers: WorkerPool) -> None:
        """Stops the first worker and two of three later ones as soon as they start; they begin their slices and never
        finish them."""
        known: set[int] = set()
        while True:
            for state in workers.states():
                if state.pid is None:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    if state.pid not in known:
                        known.add(state.pid)
                        if len(known) == 1 or rng.random() < 0.7:
                            os.kill(state.pid, signal.SIGSTOP)
                    elif state.is_busy and blow is signal.SIGKILL:
                        os.kill(state.pid, blow)
            await asyncio.sleep(0.001)

    async with running(model_config(model), lora, engine_config(step_tokens=64)) as engine:
        backend = backend_of(engine)
        assert backend.workers.await_all(timeout_s=30)
        striking = asyncio.create_task(strike(backend.workers))
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=6) for each in asked))
        striking.cancel()
        assert backend.modules_redone > 0, "the blows missed"
        assert backend.workers.await_all(timeout_s=30), "the last one was not replaced"
    oracle.check_answers(asked, answers)
