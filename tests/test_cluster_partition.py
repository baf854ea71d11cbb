"""Four `caraserve serve` processes, of which two are cut off from two: both sides serve, and join again later."""

import contextlib
import urllib.error
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from caraserve import demo
from tests.oracle.oracle import Oracle
from tests.processes import NAMES, Server, all_alive, fleet, free_ports, tiny_adapter, until
from tests.wires import Wires, wires

PROMPT, TOKENS = (70, 411, 23, 9, 300), 8
LEFT, RIGHT = ("a", "b"), ("c", "d")
EVERYWHERE = "everywhere"  # each process has read its files
# Each is loaded into one process, from which others get it: before the cut, and while it lasts.
BEFORE = {"old-left": "a", "old-right": "d", "unloaded": "d"}
MEANWHILE = {"new-left": "b", "new-right": "d"}
SERVED = {LEFT: ("old-left", "new-left"), RIGHT: ("old-right", "unloaded", "new-right")}  # while it lasts

Tokens = list[int]


def right_tokens(folders: Mapping[str, Path]) -> dict[str, Tokens]:
    """Returns the answer of transformers and peft."""
    oracle = Oracle(demo.model_folder(), folders)
    right = {name: oracle.greedy(PROMPT, name, TOKENS) for name in folders}
    different = {tuple(tokens) for tokens in (*right.values(), oracle.greedy(PROMPT, None, TOKENS))}
    assert len(different) == len(folders) + 1, "an answer could be another adapter's, or the base model's"
    return right


def answer(server: Server, name: str) -> Tokens:
    how = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    choice = server.ask("/v1/completions", {"model": name, "prompt": PROMPT, **how})["choices"][0]
    return list(choice["token_ids"])


def answers(server: Server, names: Iterable[str]) -> dict[str, Tokens]:
    """Returns the server's answers by adapter, once it sees holders of all these adapters; fails after 2 s."""
    until(lambda: all(server.adapters()[name]["holders"] for name in names), 2)
    return {name: answer(server, name) for name in names}


def refuses(server: Server, name: str) -> bool:
    try:
        answer(server, name)
    except urllib.error.HTTPError as error:
        return error.code == 404
    return False


def each_knows_each(servers: Mapping[str, Server]) -> bool:
    """Whether all are connected, each to each: an instance known only through others would be missed later."""
    members = [member for server in servers.values() for member in server.ask("/v1/cluster")["data"]]
    return len(members) == len(NAMES) ** 2 and all(member["load"] is not None for member in members)


def each_side_sees_itself_alone(servers: Mapping[str, Server]) -> bool:
    return all(
        {name for name, state in servers[one].states().items() if state == "alive"} == set(side)
        for side in (LEFT, RIGHT)
        for one in side
    )


@contextlib.contextmanager
def clients(servers: Mapping[str, Server], right: Tokens) -> Iterator[None]:
    """Sends requests to each process all the time meanwhile, and checks that all answers are right."""
    enough = Event()

    def ask(server: Server) -> int:
        count = 0
        while not enough.wait(0.05):
            assert answer(server, EVERYWHERE) == right
            count += 1
        return count

    with ThreadPoolExecutor(len(servers)) as pool:
        counts = [pool.submit(ask, server) for server in servers.values()]
        try:
            yield
        finally:
            enough.set()
        assert all(count.result() > 0 for count in counts)


@contextlib.contextmanager
def wired_fleet(folder: Path) -> Iterator[tuple[Wires, dict[str, Server]]]:
    ports = free_ports(len(NAMES))
    with wires(dict(zip(NAMES, ports, strict=True))) as between:

        def more(name: str) -> tuple[str, ...]:
            # Two answer all that they are asked themselves, and so need the bytes; requests to the others travel.
            routing = "local" if name in ("a", "c") else "auto"
            where = "--advertise", f"127.0.0.1:{between.ports[name]}", "--adapters-dir", str(folder / "adapters")
            return *where, "--routing", routing, "--dtype", "float32"

        peers = [between.ports[name] for name in ("a", "c")]
        with fleet(ports, folder, more, peers=peers, on_start=between.pids.__setitem__) as servers:
            yield between, servers


def test_both_sides_of_a_partition_serve_and_join_again_when_it_heals(tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"  # what lies deeper in it is not looked for
    paths = {EVERYWHERE: adapters / EVERYWHERE} | {name: adapters / "later" / name for name in (*BEFORE, *MEANWHILE)}
    right = right_tokens({name: tiny_adapter(path, seed) for seed, (name, path) in enumerate(paths.items())})
    with wired_fleet(tmp_path) as (between, servers):

        def load(places: Mapping[str, str]) -> None:
            for name, one in places.items():
                servers[one].ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(paths[name])})

        def know(side: tuple[str, ...], *names: str) -> bool:
            return all(servers[one].adapters().keys() == {EVERYWHERE, *names} for one in side)

        until(lambda: each_knows_each(servers), 20)
        load(BEFORE)
        until(lambda: know(NAMES, *BEFORE), 2)

        with clients(servers, right[EVERYWHERE]):
            between.cut(LEFT, RIGHT)
            until(lambda: each_side_sees_itself_alone(servers), 2)
            load(MEANWHILE)
            servers["b"].ask("/v1/unload_lora_adapter", {"lora_name": "unloaded"})
            until(lambda: know(LEFT, "old-left", "old-right", "new-left"), 2)
            until(lambda: know(RIGHT, *BEFORE, "new-right"), 2)
            for side, names in SERVED.items():
                for one in side:
                    assert answers(servers[one], names) == {name: right[name] for name in names}
            until(lambda: all(servers[one].states()[far] == "dead" for one in LEFT for far in RIGHT), 10)
            until(lambda: all(servers[one].states()[far] == "dead" for one in RIGHT for far in LEFT), 10)
            assert each_side_sees_itself_alone(servers)
            between.heal()
            until(lambda: all_alive(servers), 2)
            until(lambda: know(NAMES, "old-left", "old-right", "new-left", "new-right"), 2)

        for server in servers.values():
            assert answers(server, MEANWHILE) == {name: right[name] for name in MEANWHILE}
        until(lambda: all(refuses(server, "unloaded") for server in servers.values()), 2)
