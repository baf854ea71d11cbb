"""Checks of paths, names and certificates before weights are read."""

import ssl
from collections.abc import Sequence
from pathlib import Path

from caraserve import demo
from caraserve.cluster.membership.dns import is_loopback
from caraserve.config import ClusterConfig, HttpConfig, LoraConfig, ModelConfig
from caraserve.core.adapter_rules import check_adapter_name
from caraserve.errors import ConfigError
from caraserve.http.tls_files import PemFile, TlsFiles, load_files
from caraserve.lora.base_names import Likeness, likeness, names_of_base
from caraserve.lora.folder_contents import NO_ADAPTERS, why_no_adapter
from caraserve.lora.served_base import ServedBase
from caraserve.model.families import read_config
from caraserve.model.gguf.files import card_of, names_in, plain_name
from caraserve.model.gguf.reader import opened_model
from caraserve.model.plan import DecoderPlan
from caraserve.tokenizer.tokenizer import Tokenizer
from caraserve.util.cache_folder import why_unwritable


def check_paths(model: ModelConfig, lora: LoraConfig) -> None:
    """Raises ConfigError for a configured file or folder that does not exist."""
    if model.chat_template is not None and not model.chat_template.is_file():
        raise ConfigError(f"--chat-template {str(model.chat_template)!r} is not a file")
    if lora.adapters_dir is not None and (problem := _why_no_folder(lora.adapters_dir)):
        raise ConfigError(f"--adapters-dir {problem}; make the folder, or give another one")
    if lora.adapters_dir is not None and lora.takes_uploads:
        _check_takes_uploads(lora.adapters_dir)
    for root in lora.allow_adapter_path:
        if problem := _why_no_folder(root):
            raise ConfigError(f"--allow-adapter-path {problem}; make the folder, or give another one")
    for module in lora.lora_modules:
        problem = _why_no_folder(module.path)
        if not problem and (why := why_not_adapter(module.path)):
            problem = f"{str(module.path)!r}: {why}"
        if problem:
            fetch = "`hf download ORG/NAME --local-dir DIR` fetches one from the Hugging Face Hub"
            is_file, parent = module.path.is_file(), str(module.path.parent)
            advice = f"give the folder that it is in, {parent!r}" if is_file else f"give an adapter's folder ({fetch})"
            raise ConfigError(f"adapter {module.name!r}: {problem}; {advice}")


def _why_no_folder(path: Path) -> str:
    """Returns why a path is no folder; "" if it is one."""
    if path.is_dir():
        return ""
    return f"{str(path)!r} {'is a file, not a folder' if path.exists() else 'does not exist'}"


def adapter_folders(adapters_dir: Path) -> list[Path]:
    """Returns the folders in --adapters-dir that may be adapters'. Raises ConfigError."""
    try:
        found = sorted(path for path in adapters_dir.iterdir() if path.name[0] != "." and path.name not in NO_ADAPTERS)
    except OSError as error:
        raise ConfigError(f"--adapters-dir {str(adapters_dir)!r} cannot be read: {error.strerror}") from None
    return [path for path in found if path.is_dir()]


def adapter_roots(lora: LoraConfig) -> tuple[Path, ...]:
    """Returns the folders from which adapters may be loaded at run time, in the order for relative paths."""
    given = lora.allow_adapter_path if lora.adapters_dir is None else [lora.adapters_dir, *lora.allow_adapter_path]
    return tuple(root.resolve() for root in given)


def upload_root(lora: LoraConfig) -> Path | None:
    """Returns the folder in which uploaded adapters are stored: --adapters-dir, else the first --allow-adapter-path
    that can be written; None if there is none."""
    if lora.adapters_dir is not None:
        return lora.adapters_dir.resolve()
    own = [root for root in lora.allow_adapter_path if not demo.is_bundled(root)]
    return next((root.resolve() for root in own if not why_unwritable(root)), None)


def why_not_adapter(path: Path) -> str | None:
    """Returns why a folder in --adapters-dir lacks an adapter's files; None if it has them."""
    try:
        return why_no_adapter(path)
    except OSError as error:
        return f"the folder cannot be read: {error.strerror}"


def check_routing(cluster: ClusterConfig) -> None:
    """Raises ConfigError for a routing policy without instances to choose from."""
    if cluster.routing is not None and not cluster.peers:
        raise ConfigError("--routing chooses among the instances of --peers; give both")


def exposure(http: HttpConfig) -> str:
    """Returns a warning if other machines can connect without a key or a certificate; otherwise ""."""
    if http.needs_keys or http.ssl_ca_certs is not None or is_loopback(http.host):
        return ""
    return (
        f"--host {http.host} lets other machines use this server, and none needs a key: --api-key and --admin-key ask "
        "for one, --host 127.0.0.1 listens to this machine only"
    )


def _check_takes_uploads(folder: Path) -> None:
    if why := why_unwritable(folder):
        raise ConfigError(
            f"--adapters-dir takes uploads with --allow-runtime-lora-updating, and {why}; make it writable, or name it "
            "in --allow-adapter-path instead: then adapters are only loaded from it"
        )


def check_names(model: ModelConfig, lora: LoraConfig, base_names: tuple[str, ...]) -> None:
    """Raises ConfigError for adapters with equal names, with a name of the base model, or for another base model."""
    assert model.model is not None
    names = [module.name for module in lora.lora_modules]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--lora-modules names the adapter {min(twice)!r} twice")
    ours = names_of_base([*base_names, str(model.model.resolve())])
    for module in lora.lora_modules:
        for name in base_names:
            check_adapter_name(module.name, name)
        if module.base_model is not None and likeness(module.base_model, ours) is Likeness.OTHER:
            raise ConfigError(
                f"adapter {module.name!r} says that its base model is {module.base_model!r}; "
                f"{base_names[0]!r} is served here"
            )


def base_names(model: ModelConfig) -> tuple[str, ...]:
    """Returns all names of the base model in the API; /v1/models lists only the first."""
    assert model.model is not None, "with_demo comes first"
    return tuple(dict.fromkeys(model.served_model_name)) or (plain_name(model.model.resolve()),)


def served_names(model: ModelConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the base model's names with which adapters' are compared: those in the API, its folder's, and the one in
    config.json or those in a GGUF file."""
    assert model.model is not None
    if model.model.is_file():
        return names_of_base([*names, *names_in(opened_model(model.model).metadata, model.model)])
    given = read_config(model.model).get("_name_or_path")
    return names_of_base([*names, str(model.model.resolve()), *([given] if isinstance(given, str) else [])])


def served_base(
    plan: DecoderPlan, model: ModelConfig, lora: LoraConfig, names: Sequence[str], tokenizer: Tokenizer
) -> ServedBase:
    """Returns the base model with which adapters' folders are compared. `names`: in the API."""
    return ServedBase(
        served_names(model, names),
        tokenizer.info.get("chat_template"),
        tokenizer.has_token,
        requires_name=lora.require_base_name,
        takes_templates=lora.adapter_chat_templates,
        formats=plan.format_names(model.dtype),
        card=card_of(opened_model(model.model)) if model.model is not None and model.model.is_file() else {},
    )


def client_tls(http: HttpConfig, cluster: ClusterConfig) -> TlsFiles | None:
    """Returns the TLS context for clients' connections; None for plain HTTP. Raises ConfigError."""
    if http.ssl_certfile is None:
        if http.ssl_keyfile is not None or http.ssl_ca_certs is not None:
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        return None
    if cluster.peers and cluster.peer_port is None:
        raise ConfigError("--ssl-certfile with --peers needs --peer-port: instances do not connect as clients do")
    files = (http.ssl_certfile, http.ssl_keyfile, http.ssl_ca_certs)
    return TlsFiles(lambda: [_client_context(http)], [file for file in files if file is not None])


def _client_context(http: HttpConfig) -> ssl.SSLContext:
    assert http.ssl_certfile is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_files(
        context,
        PemFile("--ssl-certfile", http.ssl_certfile),
        None if http.ssl_keyfile is None else PemFile("--ssl-keyfile", http.ssl_keyfile),
        None if http.ssl_ca_certs is None else PemFile("--ssl-ca-certs", http.ssl_ca_certs),
    )
    if http.ssl_ca_certs is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context
