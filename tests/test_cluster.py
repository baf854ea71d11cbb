"""Several `caraserve serve` processes as one service: membership and restarts."""

import signal
from pathlib import Path

from caraserve import demo
from tests.processes import NAMES, Server, all_alive, fleet, free_ports, until


def all_go_by_one_plan(servers: dict[str, Server]) -> bool:
    epochs = {server.metric("caraserve:plan_epoch{") for server in servers.values()}  # 0: none yet
    return len(epochs) == 1 and 0 not in epochs


def aliased(server: Server) -> str | None:
    """Returns the adapter for which the alias prod stands on an instance."""
    return next((alias["adapter"] for alias in server.ask("/v1/aliases")["data"] if alias["name"] == "prod"), None)


def test_the_life_of_a_fleet(tmp_path: Path) -> None:
    ports = free_ports(len(NAMES))
    poet = {"lora_name": "bard", "lora_path": str(demo.adapters_folder() / "poet")}
    with fleet(ports, tmp_path) as servers:
        until(lambda: all_alive(servers), 4)
        a, b, c, d = servers.values()
        until(lambda: all(one["load"] is not None for one in b.ask("/v1/cluster")["data"]), 1)
        assert {one["load"]["status"] for one in b.ask("/v1/cluster")["data"]} == {"serving"}
        until(lambda: all(server.ready() for server in servers.values()), 2)

        a.ask("/v1/load_lora_adapter", poet)
        until(lambda: all("bard" in server.adapters() for server in servers.values()), 2)
        assert c.adapters()["bard"]["digest"] == c.adapters()["poet"]["digest"]
        until(lambda: set(c.adapters()["bard"]["holders"]) == set(NAMES), 2)
        b.ask("/v1/unload_lora_adapter", {"lora_name": "pirate"})
        until(lambda: all("pirate" not in server.adapters() for server in servers.values()), 2)
        until(lambda: "pirate" not in [model["id"] for model in c.ask("/v1/models")["data"]], 2)

        for adapter in ("poet", "chef"):
            d.ask("/v1/aliases/prod", {"adapter": adapter}, "PUT")
        until(lambda: all(aliased(server) == "chef" for server in servers.values()), 1)
        c.ask("/v1/aliases/prod/rollback", {})
        c.ask("/v1/adapters/poet", {"labels": {"team": "search"}, "pinned": "host"}, "PATCH")
        until(lambda: all(aliased(server) == "poet" for server in servers.values()), 1)
        until(lambda: a.ask("/v1/adapters/poet")["pinned"] == "host", 1)

        c.process.kill()
        until(lambda: all(server.states()["c"] != "alive" for server in (a, b, d)), 0.5)
        until(lambda: all(server.states()["c"] == "dead" for server in (a, b, d)), 3)
        b.process.send_signal(signal.SIGTERM)
        assert b.process.wait(20) == 0
        assert a.states()["b"] == "left"
        metrics = a.ask("/metrics")
        assert 'caraserve:cluster_members{state="dead"' in metrics
        assert "caraserve:cluster_entries_refused_total" in metrics
    with fleet(ports[:2], tmp_path) as servers:  # the others stay dead
        until(lambda: all(server.states().get(name) == "alive" for server in servers.values() for name in "ab"), 4)
        assert all("bard" in server.adapters() for server in servers.values())
        until(lambda: all(aliased(server) == "poet" for server in servers.values()), 2)
        assert servers["b"].ask("/v1/adapters/poet")["labels"] == {"team": "search"}
        until(lambda: all_go_by_one_plan(servers), 20)
        answer = servers["a"].ask("/v1/completions", {"model": "bard", "prompt": "O sea", "max_tokens": 4})
        assert answer["usage"]["completion_tokens"] == 4
