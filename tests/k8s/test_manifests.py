"""The manifests in scripts/k8s: valid by their schemas, at one with one another and with the server they start."""

import copy
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import kubernetes_validate
import pytest

from caraserve import demo
from caraserve.cli.main import _parser
from caraserve.cluster.routing.cost import Backlog
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.price_metrics import price_families
from caraserve.config import LOADING_MODES
from caraserve.http.app import make_app
from caraserve.http.context import HttpTimings
from caraserve.util.units import parse_bytes
from tests.http.fake_engine import FakeEngine, FakeSnapshot
from tests.http.serving import http_config, new_metrics
from tests.k8s.kustomize import Built, Document, build, containers_of, documents, pod_of
from tests.k8s.schemas import CUSTOM, PICKER_CONFIG

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "k8s"
# The oldest with which they must work, where `sleep` in preStop is there without being asked for; and the newest.
KUBERNETES = ("1.30", "1.37")


# Each can be applied by itself; the last has all components.
FOLDERS = ("base", "overlays/kind", "overlays/gpu", "overlays/gateway", "overlays/monitoring", "overlays/all")


@cache
def built(folder: str) -> Built:
    return build(FOLDER / folder)


def whole() -> Built:
    return built(FOLDERS[-1])


def named(document: Document) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def pod(folder: str = FOLDERS[-1]) -> Document:
    return pod_of(built(folder).one("StatefulSet"))


def server(folder: str = FOLDERS[-1]) -> Document:
    (container,) = pod(folder)["containers"]
    return dict(container)


def init_container() -> Document:
    (container,) = pod()["initContainers"]
    return dict(container)


def options(folder: str = FOLDERS[-1]) -> Mapping[str, str]:
    """The variables of the generated config map."""
    return built(folder).options["caraserve-options"]


def arguments(folder: str = FOLDERS[-1]) -> Any:
    """What the server makes of the manifest's arguments and variables, as Kubernetes puts variables into arguments."""
    variables = {"POD_NAME": "caraserve-0", **options(folder)}
    values = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], each) for each in server(folder)["args"]]
    with patch.dict(os.environ, variables):
        return _parser().parse_args(values)


def picker_config() -> Document:
    (path,) = whole().config_maps["caraserve-picker"]
    (config,) = documents(path)
    return config


# --- schemas ---


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("document", [d for d in whole().documents if d["kind"] not in CUSTOM], ids=named)
def test_kubernetes_accepts_it(document: Document, version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_stands_alone_with_its_patches(folder: str) -> None:
    kubernetes_validate.validate(built(folder).one("StatefulSet"), KUBERNETES[-1], strict=True)
    assert {document["metadata"]["namespace"] for document in built(folder).documents} == {"caraserve"}


@pytest.mark.parametrize("folder", ["base", "overlays/kind"])
def test_a_plain_cluster_has_all_that_is_asked_of_it(folder: str) -> None:
    """No kinds of others, no GPU, and no volume but those that every cluster with a default storage class makes."""
    assert not CUSTOM.keys() & {document["kind"] for document in built(folder).documents}
    assert all("nvidia.com/gpu" not in str(one["resources"]) for one in containers_of(built(folder).one("StatefulSet")))
    claims = built(folder).one("StatefulSet")["spec"]["volumeClaimTemplates"]
    assert [claim["spec"]["accessModes"] for claim in claims] == [["ReadWriteOnce"]]
    assert all("storageClassName" not in claim["spec"] for claim in claims)
    assert not built(folder).of("PersistentVolumeClaim")


def test_the_small_fleet_fits_a_laptop_and_needs_no_network() -> None:
    replicas = built("overlays/kind").one("StatefulSet")["spec"]["replicas"]
    assert replicas * memory_bytes(server("overlays/kind")) <= 2 << 30
    assert options("overlays/kind")["MODEL"] == "demo"


def test_others_kinds_and_the_pickers_configuration_have_the_fields_of_their_types() -> None:
    for document in whole().documents:
        if document["kind"] in CUSTOM:
            jsonschema.validate(document, CUSTOM[document["kind"]])
    jsonschema.validate(picker_config(), PICKER_CONFIG)


@pytest.mark.parametrize("kind", sorted(CUSTOM))
def test_a_misspelt_field_would_be_refused(kind: str) -> None:
    document = copy.deepcopy(whole().of(kind)[0])
    document["spec"]["selectr"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, CUSTOM[kind])


def test_every_manifest_is_part_of_the_whole() -> None:
    used = {named(document) for document in whole().documents}
    found = [d for path in FOLDER.rglob("*.yaml") for d in documents(path) if "metadata" in d]
    assert {named(document) for document in found} == used
    assert len(used) == len(whole().documents)


# --- the server they start ---


def test_the_server_knows_every_argument() -> None:
    assert arguments().model == Path("/data/models") / options()["MODEL"]


def test_ports_are_those_on_which_the_server_listens_to_other_machines() -> None:
    """Production Stack's operator loads adapters at port 8000 of a pod that has no port named `container-port`."""
    ports = {port["name"]: port["containerPort"] for port in server()["ports"]}
    assert ports == {"http": arguments().port, "peers": arguments().peer_port}
    assert arguments().host == "0.0.0.0"
    assert arguments().port == 8000
    assert arguments().allow_runtime_lora_updating


def test_every_probe_asks_for_a_page_that_exists() -> None:
    app = make_app(FakeEngine(), http_config(), new_metrics(), allow_lora_updates=False)
    pages = {route.resource.canonical for route in app.router.routes() if route.method == "GET" and route.resource}
    probes = {name: server()[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {probe["path"] for probe in probes.values()} <= pages
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert probes["readiness"]["path"] == "/ready"  # 503 while it drains
    assert probes["liveness"]["path"] == "/health"  # 200 while it drains


def test_pods_get_the_time_that_draining_takes() -> None:
    """Kubernetes counts the preStop hook in; after the drain, last bytes have their time on each of two ports."""
    grace_s = pod()["terminationGracePeriodSeconds"]
    before_s = server()["lifecycle"]["preStop"]["sleep"]["seconds"] + arguments().drain_timeout_s
    assert grace_s >= before_s + 2 * HttpTimings().stop_s + 20


def test_new_requests_go_elsewhere_before_the_server_refuses_them() -> None:
    readiness = server()["readinessProbe"]
    seconds = server()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert seconds > readiness["periodSeconds"] * readiness["failureThreshold"]


def test_the_picker_follows_a_stream_to_its_end() -> None:
    picker = whole().one("Deployment", "caraserve-picker")["spec"]["template"]["spec"]
    assert picker["terminationGracePeriodSeconds"] >= pod()["terminationGracePeriodSeconds"]


def test_paths_in_the_arguments_lie_on_volumes_that_are_written_to_where_the_server_writes() -> None:
    """Uploads go to --adapters-dir."""
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in server()["volumeMounts"]}
    read = [arguments().model, arguments().cluster_secret_file]
    assert all(any(path.is_relative_to(mount) for mount in mounts) for path in read)
    cache = [Path(variable["value"]) for variable in server()["env"] if variable["name"] == "XDG_CACHE_HOME"]
    written = [arguments().adapters_dir, arguments().registry, *cache]
    writable = [mount for mount, read_only in mounts.items() if not read_only]
    assert all(any(path.is_relative_to(mount) for mount in writable) for path in written)


@pytest.mark.parametrize("folder", FOLDERS)
def test_variables_are_options_or_are_read_by_the_script_that_fills_the_volume(folder: str) -> None:
    others = {name for name in options(folder) if not name.startswith("CARASERVE_")}
    assert others == {"MODEL", "ADAPTERS"}
    known = {f"CARASERVE_{name[2:].upper().replace('-', '_')}" for name in serve_options()}
    assert options(folder).keys() - others <= known


@pytest.mark.parametrize("folder", ["base", "overlays/kind"])
def test_on_a_cpu_caches_and_threads_fit_the_container(folder: str) -> None:
    """By default they follow the free memory and the cores of the node."""
    assert arguments(folder).cpu_threads <= max(1, int(server(folder)["resources"]["limits"].get("cpu", 1)))
    assert not LOADING_MODES[arguments(folder).loading_mode].uses_workers
    used_bytes = arguments(folder).kv_cache_bytes + arguments(folder).max_host_adapters_bytes
    assert used_bytes <= memory_bytes(server(folder)) / 2


def memory_bytes(container: Document) -> int:
    """The memory that a container may use."""
    return parse_bytes(container["resources"]["limits"]["memory"] + "B")


def serve_options() -> set[str]:
    parser = _parser()._subparsers._group_actions[0].choices["serve"]  # type: ignore[union-attr, index]
    return {name for action in parser._actions for name in action.option_strings if name.startswith("--")}


@pytest.mark.parametrize("workload", [*whole().of("StatefulSet"), *whole().of("Deployment")], ids=named)
def test_what_is_mounted_is_a_volume_and_the_other_way_round(workload: Document) -> None:
    spec = workload["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
    mounted = {mount["name"] for container in containers_of(workload) for mount in container["volumeMounts"]}
    assert mounted == volumes


def test_the_root_file_system_is_read_only_so_there_is_another_place_for_temporary_files() -> None:
    for container in (init_container(), server()):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


# --- what fills a pod's volume ---

HUB = """#!/bin/sh
# Stands for `hf download REPOSITORY --local-dir FOLDER …`.
echo "$@" >> "$CALLS"
echo "$2" > "$4/config.json"
[ "$2" != org/cut-off ]
"""


def fill(tmp_path: Path, **variables: str) -> tuple[int, list[str]]:
    """Runs the script as a pod does, with a stand-in for the hub; returns its exit code and what it fetched so far."""
    hub = tmp_path / "bin" / "hf"
    hub.parent.mkdir(exist_ok=True)
    hub.write_text(HUB)
    hub.chmod(hub.stat().st_mode | stat.S_IXUSR)
    calls = tmp_path / "calls"
    calls.touch()
    (path,) = built("base").config_maps["caraserve-fill"]
    path_variable = f"{hub.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path_variable, "CALLS": str(calls), "DATA": str(tmp_path / "data"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", str(path)], env=environment | variables, cwd=tmp_path, check=False)
    return done.returncode, [line.split()[1] for line in calls.read_text().splitlines()]


def test_the_script_runs_from_its_volume_with_the_servers_image_and_variables() -> None:
    (path,) = built("base").config_maps["caraserve-fill"]
    (mount,) = [mount for mount in init_container()["volumeMounts"] if mount["name"] == "fill"]
    assert init_container()["command"] == ["sh", f"{mount['mountPath']}/{path.name}"]
    assert init_container()["image"] == server()["image"]
    assert init_container()["envFrom"] == server()["envFrom"]
    assert shutil.which("hf", path=Path(sys.executable).parent)  # a package that the server needs brings it


def test_a_model_and_adapters_are_fetched_once(tmp_path: Path) -> None:
    variables = {"MODEL": "org/model", "ADAPTERS": "sql=org/sql-lora poet=org/poet"}
    assert fill(tmp_path, **variables) == (0, ["org/model", "org/sql-lora", "org/poet"])
    assert fill(tmp_path, **variables) == (0, ["org/model", "org/sql-lora", "org/poet"])
    found = {str(path.relative_to(tmp_path / "data")) for path in (tmp_path / "data").rglob("config.json")}
    assert found == {"models/org/model/config.json", "adapters/sql/config.json", "adapters/poet/config.json"}


def test_what_was_cut_off_is_fetched_again_and_is_no_adapter_meanwhile(tmp_path: Path) -> None:
    variables = {"MODEL": "org/model", "ADAPTERS": "sql=org/cut-off"}
    code, _ = fill(tmp_path, **variables)
    assert code != 0
    assert [path.name for path in (tmp_path / "data" / "adapters").iterdir()] == [".sql"]
    assert fill(tmp_path, **variables)[1] == ["org/model", "org/cut-off", "org/cut-off"]


def test_the_demo_comes_from_the_image_and_uploads_stay(tmp_path: Path) -> None:
    assert fill(tmp_path, **options("overlays/kind")) == (0, [])
    adapters = tmp_path / "data" / "adapters"
    assert {path.name for path in adapters.iterdir()} == set(demo.ADAPTER_NAMES)
    assert (tmp_path / "data" / "models" / "demo" / "config.json").exists()
    (adapters / "mine").mkdir()
    shutil.rmtree(adapters / "poet")
    assert fill(tmp_path, **options("overlays/kind")) == (0, [])
    assert {path.name for path in adapters.iterdir()} == {*demo.ADAPTER_NAMES, "mine"} - {"poet"}


# --- one another ---


def references() -> Iterator[tuple[str, str]]:
    """(kind, name) of everything that workloads, pools, routes and roles refer to."""
    for workload in (*whole().of("StatefulSet"), *whole().of("Deployment")):
        if "serviceName" in workload["spec"]:
            yield "Service", workload["spec"]["serviceName"]
        yield from pod_references(workload["spec"]["template"]["spec"])
    for pool in whole().of("InferencePool"):
        yield "Service", pool["spec"]["endpointPickerRef"]["name"]
    for route in whole().of("HTTPRoute"):
        yield from (("Gateway", parent["name"]) for parent in route["spec"]["parentRefs"])
        yield from ((ref["kind"], ref["name"]) for rule in route["spec"]["rules"] for ref in rule["backendRefs"])
    for binding in whole().of("RoleBinding"):
        yield binding["roleRef"]["kind"], binding["roleRef"]["name"]
        yield from ((subject["kind"], subject["name"]) for subject in binding["subjects"])


def pod_references(spec: Document) -> Iterator[tuple[str, str]]:
    if "serviceAccountName" in spec:
        yield "ServiceAccount", spec["serviceAccountName"]
    for volume in spec["volumes"]:
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    containers = [*spec.get("initContainers", ()), *spec["containers"]]
    for source in [source for container in containers for source in container.get("envFrom", ())]:
        yield "ConfigMap", source["configMapRef"]["name"]
    for variable in [variable for container in containers for variable in container.get("env", ())]:
        secret = variable.get("valueFrom", {}).get("secretKeyRef")
        if secret is not None and not secret.get("optional"):
            yield "Secret", secret["name"]


@pytest.mark.parametrize("reference", sorted(set(references())), ids="/".join)
def test_what_is_referred_to_is_there(reference: tuple[str, str]) -> None:
    there = {(document["kind"], document["metadata"]["name"]) for document in whole().documents}
    there |= {("Secret", name) for name in whole().secrets} | {("ConfigMap", name) for name in whole().config_maps}
    assert reference in there


def test_the_secret_is_mounted_under_the_name_that_the_server_reads_and_is_not_kept() -> None:
    assert [arguments().cluster_secret_file.name] == whole().secrets["caraserve-cluster"]
    assert (FOLDER / "base" / ".gitignore").read_text(encoding="utf-8").split() == whole().secrets["caraserve-cluster"]


def test_services_pools_and_monitors_select_the_instances() -> None:
    labels = whole().one("StatefulSet")["spec"]["template"]["metadata"]["labels"].items()
    selectors = [service["spec"]["selector"] for service in whole().of("Service") if "picker" not in named(service)]
    selectors += [whole().one(kind)["spec"]["selector"]["matchLabels"] for kind in ("InferencePool", "PodMonitor")]
    selectors += [whole().one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]]
    selectors += [whole().one("StatefulSet")["spec"]["selector"]["matchLabels"]]
    assert all(selector.items() <= labels for selector in selectors)


def test_services_lead_to_ports_that_their_pods_have() -> None:
    picker = whole().one("Deployment", "caraserve-picker")["spec"]["template"]["spec"]["containers"][0]
    for service in whole().of("Service"):
        container = picker if "picker" in named(service) else server()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= {
            port["name"] for port in container["ports"]
        }


def test_instances_find_one_another_before_they_are_ready() -> None:
    """A pod has a name of its own below a headless service, and before it is ready only if that lists such pods."""
    peers = whole().one("Service", "caraserve-peers")["spec"]
    assert (peers["clusterIP"], peers["publishNotReadyAddresses"]) == ("None", True)
    port = arguments().peer_port
    assert [entry["port"] for entry in peers["ports"]] == [port]
    assert arguments().peers == (f"caraserve-peers:{port}",)
    assert arguments().advertise == f"caraserve-0.caraserve-peers:{port}"
    assert arguments().name == "caraserve-0"


def test_the_pool_leads_to_the_servers_port_and_the_pickers() -> None:
    pool = whole().one("InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": arguments().port}]
    ports = whole().one("Service", "caraserve-picker")["spec"]["ports"]
    assert pool["endpointPickerRef"]["port"]["number"] in {port["port"] for port in ports}


def test_only_one_of_them_routes() -> None:
    """With a picker in front, instances answer what they get; without, they choose among themselves."""
    assert arguments().routing == "local"
    assert arguments("base").routing is None


def test_the_gpu_is_asked_for_once_and_only_with_its_component() -> None:
    assert server()["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert (arguments().device, arguments("base").device) == ("cuda", "auto")
    for container in containers_of(built("base").one("StatefulSet")):
        assert container["resources"]["limits"] == container["resources"]["requests"]  # guaranteed, whole cores


# --- the picker's configuration ---


def plugins() -> dict[str, Document]:
    return {plugin.get("name", plugin["type"]): plugin for plugin in picker_config()["plugins"]}


def test_the_picker_refers_to_plugins_that_it_has() -> None:
    config = picker_config()
    used = [entry["pluginRef"] for profile in config["schedulingProfiles"] for entry in profile["plugins"]]
    for source in config["dataLayer"]["sources"]:
        used += [source["pluginRef"], *(extractor["pluginRef"] for extractor in source["extractors"])]
    assert set(used) <= set(plugins())
    assert set(plugins()) - set(used) == {"single-profile-handler"}


def test_the_picker_knows_the_instances_by_their_label() -> None:
    labels = whole().one("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    (engine,) = plugins()["core-metrics-extractor"]["parameters"]["engineConfigs"]
    assert engine["name"] == labels["llm-d.ai/engine-type"]


def test_every_metric_that_the_picker_reads_is_one_that_an_instance_shows() -> None:
    metrics = new_metrics()
    metrics.show(lambda labels: price_families(PerfModel(0.004, 0.0, 32.0, True, 10.0, 0.1, 0.0), Backlog(), labels))
    text = metrics.render(FakeSnapshot(), lambda name: 8).decode()
    (engine,) = plugins()["core-metrics-extractor"]["parameters"]["engineConfigs"]
    specs = [value for key, value in engine.items() if key.endswith("Spec")]
    specs += [metric["metricSpec"] for metric in engine["customMetrics"]]
    for spec in specs:
        assert f"\n{spec.replace('}', ',') if '{' in spec else spec + '{'}" in text


def test_scorers_read_attributes_that_the_extractor_writes() -> None:
    (engine,) = plugins()["core-metrics-extractor"]["parameters"]["engineConfigs"]
    written = {metric["attributeKey"] for metric in engine["customMetrics"]}
    scorers = [p["parameters"] for p in plugins().values() if p["type"] == "endpoint-attribute-scorer"]
    assert {scorer["attributeKey"] for scorer in scorers} == written


def test_the_pickers_arguments_name_its_pool_and_its_file() -> None:
    (container,) = whole().one("Deployment", "caraserve-picker")["spec"]["template"]["spec"]["containers"]
    given = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    assert given["pool-name"] == whole().one("InferencePool")["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    (path,) = whole().config_maps["caraserve-picker"]
    assert given["config-file"] == f"{mount['mountPath']}/{path.name}"
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert (given["grpc-port"], given["grpc-health-port"]) == (ports["grpc"], ports["grpc-health"])


# --- the image ---


def test_the_image_starts_what_the_manifest_calls() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert 'ENTRYPOINT ["caraserve"]' in lines
    assert server()["args"][0] == "serve"
    assert f"USER {pod()['securityContext']['runAsUser']}" in lines
    (exposed,) = [line.split()[1:] for line in lines if line.startswith("EXPOSE")]
    assert exposed == [str(port["containerPort"]) for port in server()["ports"]]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_images_of_the_folders_are_those_that_the_dockerfile_says_how_to_build(folder: str) -> None:
    """With a tag that is not `latest`, Kubernetes takes an image that was loaded into the node."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    images = {one["image"] for one in containers_of(built(folder).one("StatefulSet"))}
    assert len(images) == 1
    assert f"-t {min(images)} " in text
