"""What `caraserve serve` is asked for: by arguments, by the environment, by a file, and in other servers' words."""

import argparse
import json
from pathlib import Path

import pytest

from caraserve import backend_factory, demo
from caraserve.cli import main
from caraserve.cli.compat_flags import FLAGS, SAME, VARIABLES
from caraserve.cli.options import OptionParser
from caraserve.config import (
    KEEP_ALIVE_S,
    SERVE_CONFIGS,
    ClusterConfig,
    EngineConfig,
    HttpConfig,
    LoraConfig,
    LoraModule,
    ModelConfig,
)
from caraserve.errors import ConfigError
from caraserve.lora.folder_watch import _POLL_S
from caraserve.start_checks import check_names

MODEL, POET, CHEF = "/models/llama", "/adapters/poet", "/adapters/chef"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def parser() -> OptionParser:
    return OptionParser(SERVE_CONFIGS, prog="serve")


def parsed(*words: str) -> argparse.Namespace:
    return parser().parse_args(words)


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(*words)
    assert "\n" not in caught.value.message
    return caught.value.message


# Argument lists of the guides of other servers, their models and adapters replaced by ones that could be here.
START_LINES = {
    "vllm: lora": [MODEL, "--enable-lora", "--lora-modules", f"sql-lora={POET}"],
    "vllm: lora as json": [
        *(MODEL, "--enable-lora", "--lora-modules"),
        json.dumps({"name": "sql-lora", "path": POET, "base_model_name": "llama"}),
    ],
    "vllm: lora, slots": [
        *(MODEL, "--enable-lora", "--max-loras", "4", "--max-lora-rank", "64", "--max-cpu-loras", "8"),
        *("--lora-modules", f"a={POET}", f"b={CHEF}"),
    ],
    "vllm: api server": [
        *("--model", MODEL, "--host", "0.0.0.0", "--port", "8000", "--tensor-parallel-size", "1"),
        *("--gpu-memory-utilization", "0.33", "--max-model-len", "1k", "--served-model-name", "qwen", "llama"),
    ],
    "vllm: with tools": [
        *("--model", MODEL, "--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--enable-lora"),
        *("--lora-modules", f"grpo={POET}", "--gpu-memory-utilization", "0.8", "--port", "8001"),
        *("--max_model_len", "1000"),
    ],
    "vllm: on kubernetes": [
        *(MODEL, "--trust-remote-code", "--enable-chunked-prefill", "--max_num_batched_tokens", "1024"),
    ],
    "gateway api inference extension": [
        *("--model", MODEL, "--tensor-parallel-size", "1", "--port", "8000", "--max-num-seq", "1024"),
        *("--compilation-config", "3", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "64"),
        *("--max-cpu-loras", "12", "--lora-modules", json.dumps([{"name": "food-review", "path": POET}])),
    ],
    "kserve: hugging face runtime": [
        *(f"--model_name={demo.BASE_NAME}", f"--model_dir={MODEL}", "--enable_lora", "--max-lora-rank=64"),
        *("--lora-modules", f"poet={POET}", "--dtype=half", "--backend=vllm"),
    ],
    "kserve: llm inference service": [
        *(MODEL, "--served-model-name", "llama", "--port", "8000", "--disable-log-requests", "--enable-lora"),
        *("--lora-modules", f"poet={POET}", f"chef={CHEF}", "--max-loras=2", "--enable-ssl-refresh"),
        *("--ssl-certfile", "/tls/tls.crt", "--ssl-keyfile", "/tls/tls.key"),
    ],
    "nim": ["--model", MODEL, "--enable-lora", "--max-loras", "8", "--max-lora-rank", "64", "--max-cpu-loras", "16"],
    "trl vllm-serve": [
        *("--model", MODEL, "--tensor_parallel_size", "1", "--gpu_memory_utilization", "0.85"),
        *("--max_model_len", "1000", "--enable_prefix_caching", "true", "--enforce_eager", "True"),
        *("--data_parallel_size", "1", "--kv_cache_dtype", "auto", "--trust_remote_code", "--log_level", "info"),
        *("--revision", "main"),
    ],
    "sglang": [
        *("--model-path", MODEL, "--enable-lora", "--lora-paths", f"lora0={POET}", f"lora1={CHEF}"),
        *("--max-loras-per-batch", "2", "--lora-backend", "csgmv", "--tp", "1", "--disable-radix-cache"),
    ],
}


@pytest.mark.parametrize("words", START_LINES.values(), ids=START_LINES)
def test_command_lines_of_other_servers_guides_are_accepted(words: list[str]) -> None:
    args = parsed(*words)
    assert args.model == Path(MODEL)
    for config in (ModelConfig, LoraConfig, EngineConfig, HttpConfig, ClusterConfig):
        config.from_args(args)


def test_only_options_without_effect_are_noted_with_the_reason() -> None:
    args = parsed("--enable-lora", "--max-lora-rank", "64", "--max-cpu-loras=8", "--no-enable-chunked-prefill")
    assert args.max_lora_rank == 64
    assert [note.partition(" has no effect: ")[0] for note in args.notes] == [
        *("--enable-lora", "--max-cpu-loras 8", "--no-enable-chunked-prefill")
    ]
    assert "--max-host-adapters-bytes" in args.notes[1]


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--quantization", "fp8"], "not quantised at the start"),
        (["--task", "transcription"], "transcription"),
        (["--backend", "huggingface"], "by no other library"),
        (["--scheduling-policy", "priority"], "`priority`"),
        (["-tp", "2"], "--peers"),
        (["--tensor-parallel-size=8"], "--peers"),
        (["--uds", "/run/x.sock"], "--host"),
        (["--revision", "v2"], "hf download"),
        (["--tokenizer", "other"], "model's folder"),
        (["--otlp-traces-url", "http://x"], "--otlp-traces-endpoint"),
        (["--max-logprobs", "500"], "at most 100"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else None,
)
def test_unsupported_options_are_refused_with_advice(words: list[str], instead: str) -> None:
    message = refusal(*words)
    assert message.startswith(" ".join(words).replace("=", " "))
    assert instead in message


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--task", "embed"], "/v1/embeddings"),
        (["--runner", "pooling"], "/v1/embeddings"),
        (["--reasoning-parser", "deepseek_r1"], "chat template"),
        (["--quantization", "awq"], "how it is quantised"),
        (["--tool-parser-plugin", "x.py"], "no code is loaded"),
        (["--guided-decoding-backend", "xgrammar"], "llguidance"),
        (["--lora-eviction-policy", "lru"], "how often they are requested"),
        (["--lora-target-modules", "q_proj"], "all modules that it was trained for"),
        (["--swap-space", "4"], "computed again"),
        (["--long-prefill-token-threshold", "2048"], "--max-num-batched-tokens"),
        (["--worker-use-ray"], "one process serves"),
        (["--disable-fastapi-docs"], "/docs is always served"),
        (["--disable-uvicorn-access-log"], "--no-log-requests"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else None,
)
def test_an_option_without_effect_has_its_own_reason(words: list[str], why: str) -> None:
    (note,) = parsed(*words).notes
    assert note.startswith(f"{' '.join(words)} has no effect: ")
    assert why in note


def test_a_keep_alive_of_vllms_variable_that_is_too_short_is_noted_and_has_no_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5")  # vLLM's default
    args = parsed()
    (note,) = args.notes
    assert note.startswith("VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5 has no effect: ")
    assert "at least 20" in note
    assert args.keep_alive_timeout_s == KEEP_ALIVE_S
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "30")
    assert (parsed().keep_alive_timeout_s, parsed().notes) == (30.0, [])


def test_memory_for_unread_answers_has_a_least_value() -> None:
    assert parsed("--max-unread-bytes", "16MiB").max_unread_bytes == 16 << 20
    for text in ("1", "1k", "16777215"):
        assert "at least 16.0 MiB is needed" in refusal("--max-unread-bytes", text)


def test_the_interval_of_nims_refresh_is_noted_with_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIM_PEFT_REFRESH_INTERVAL", "60")
    (note,) = parsed().notes
    assert "every second" in note
    assert _POLL_S == 1.0


def test_no_entry_of_the_table_is_an_option_of_ours() -> None:
    ours = set(parser()._option_string_actions)
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert not {*names, *SAME} & ours
    assert set(SAME.values()) <= ours
    assert set(VARIABLES.values()) <= {*ours, *names}
    assert all((flag.note or flag.values == ()) and (flag.instead or flag.values is None) for flag in FLAGS)


# --- names and values ---


@pytest.mark.parametrize(
    ("word", "near"), [("--max-lora", "--max-loras"), ("--adapter-dir", "--adapters-dir"), ("--prot", "--port")]
)
def test_an_unknown_option_names_the_nearest(word: str, near: str) -> None:
    assert refusal(word, "x") == f"unknown option {word}; did you mean {near}?"


@pytest.mark.parametrize("word", ["--nosuch", "--pipline-parallel-size", "--speculatve-config"])
def test_no_option_that_is_not_served_is_named_as_the_nearest(word: str) -> None:
    assert refusal(word, "x").startswith(f"unknown option {word}; ")
    assert not any(f"mean {name}?" in refusal(word, "x") for flag in FLAGS for name in flag.names)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--max_num_seqs", "3"], "max_num_seqs", 3),
        (["--max-num-se=3"], "max_num_seqs", 3),
        (["--max-model-len", "4k"], "max_model_len", 4000),
        (["--max-model-len", "4K"], "max_model_len", 4096),
        (["--max-model-len=25.6k"], "max_model_len", 25600),
        (["--max-model-len", "-1"], "max_model_len", None),
        (["--max-model-len", "auto"], "max_model_len", None),
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype", "float"], "dtype", "float32"),
        (["--load-format", "safetensors"], "load_format", "auto"),
        (["--enable-prefix-caching", "False"], "enable_prefix_caching", False),
        (["--enable-prefix-caching=1"], "enable_prefix_caching", True),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--served-model-name", "a", "b"], "served_model_name", ["a", "b"]),
        (["--kv-cache-memory-bytes", "1MiB"], "kv_cache_bytes", 1 << 20),
        (["--max-num-batched-tokens", "2k"], "max_num_batched_tokens", 2000),
        (["--max-num-batched-tokens", "2K"], "max_num_batched_tokens", 2048),
        (["--tokens-per-cpu", "1k"], "tokens_per_cpu", 1000),
        (["--shutdown-timeout", "10"], "drain_timeout_s", 10.0),
        (["--timeout-keep-alive", "95"], "keep_alive_timeout_s", 95.0),
        (["--enforce-eager"], "enforce_eager", True),
        (["--disable-cuda-graph"], "enforce_eager", True),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else None,
)
def test_values_may_have_the_forms_of_other_servers(words: list[str], field: str, value: object) -> None:
    assert getattr(parsed(*words), field) == value


@pytest.mark.parametrize("text", ["0", "4q", "k", "-2", ""])
def test_an_invalid_length_is_refused(text: str) -> None:
    assert "4k" in refusal(f"--max-model-len={text}")


def test_adapters_may_be_pairs_objects_or_lists_of_objects() -> None:
    one, two = {"name": "b", "path": CHEF, "base_model_name": "llama"}, {"name": "c", "path": POET}
    args = parsed("--lora-modules", f"a={POET}", json.dumps(one), "--lora-modules", json.dumps([two]))
    assert args.lora_modules == [
        *(LoraModule("a", Path(POET)), LoraModule("b", Path(CHEF), "llama"), LoraModule("c", Path(POET)))
    ]


@pytest.mark.parametrize("base", ["other", "meta/other"])
def test_an_adapter_for_another_base_model_is_refused(base: str) -> None:
    args = parsed("org/llama", "--lora-modules", json.dumps({"name": "a", "path": POET, "base_model_name": base}))
    configs = ModelConfig.from_args(args), LoraConfig.from_args(args)
    with pytest.raises(ConfigError, match="base model is"):
        check_names(*configs, ("mine",))
    check_names(*configs, (base,))


@pytest.mark.parametrize(
    ("modules", "why"), [([f"c={POET}", f"c={CHEF}"], "'c' twice"), ([f"b={POET}"], "own name")], ids=["twice", "base"]
)
def test_an_adapters_name_is_no_other_adapters_and_none_of_the_base_models(modules: list[str], why: str) -> None:
    args = parsed(MODEL, "--lora-modules", *modules)
    with pytest.raises(ConfigError, match=why):
        check_names(ModelConfig.from_args(args), LoraConfig.from_args(args), ("a", "b"))


# --- the model ---


def test_the_model_is_the_first_word_or_an_option() -> None:
    assert parsed(MODEL, "--port", "1").model == parsed("--port", "1", "--model", MODEL).model == Path(MODEL)
    assert parsed(MODEL, "--model", MODEL).model == Path(MODEL)
    assert parsed().model is None
    assert "given twice" in refusal("a", "--model", "b")


@pytest.mark.parametrize("words", [["--port", "1", MODEL], ["--enable-lora", MODEL], ["a", MODEL], ["-tp", "1", MODEL]])
def test_a_stray_word_is_refused_with_the_place_of_the_model(words: list[str]) -> None:
    message = refusal(*words)
    assert repr(MODEL) in message
    assert "--model MODEL" in message


def test_options_that_take_lists_do_not_take_the_model() -> None:
    args = parsed(MODEL, "--served-model-name", "a", "b")
    assert (args.model, args.served_model_name) == (Path(MODEL), ["a", "b"])


@pytest.mark.parametrize("option", ["--served-model-name", "--api-key", "--lora-modules", "--lora-target-modules"])
def test_a_folder_at_the_end_of_a_list_is_refused_where_no_model_is_given(option: str, tmp_path: Path) -> None:
    """The bundled demo would be served in its place."""
    message = refusal(option, f"a={POET}", str(tmp_path))
    assert repr(str(tmp_path)) in message
    assert "--model MODEL" in message


def test_the_note_on_a_hub_token_does_not_show_it() -> None:
    (note,) = parsed(MODEL, "--hf-token", "hf_secret").notes
    assert note == "--hf-token has no effect: nothing is downloaded"


# --- environment and file ---


def test_an_argument_overrides_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nmax-num-seqs: 1\nseed: 1\nlora-modules: [a=/file]\nserved_model_name: file\n")
    monkeypatch.setenv("CARASERVE_PORT", "2")
    monkeypatch.setenv("CARASERVE_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("CARASERVE_LORA_MODULES", "a=/environment b=/environment")
    args = parsed("--config", str(file), "--port", "3")
    assert (args.port, args.max_num_seqs, args.seed) == (3, 2, 1)
    assert [str(module.path) for module in args.lora_modules] == ["/environment", "/environment"]
    assert args.served_model_name == ["file"]


def test_a_file_may_have_all_kinds_of_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: {MODEL}\nenable-lora: true\nenable_prefix_caching: false\ngpu-memory-utilization: 0.5\n"
        f"trace: null\nlora-modules:\n  - a={POET}\n  - {{name: b, path: {CHEF}}}\n"
    )
    monkeypatch.setenv("CARASERVE_CONFIG", str(file))
    args = parsed()
    assert (args.model, args.enable_prefix_caching, args.gpu_memory_utilization) == (Path(MODEL), False, 0.5)
    assert [module.name for module in args.lora_modules] == ["a", "b"]
    assert args.notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-lora: 3", "unknown option --max-lora; did you mean --max-loras?"),
        ("port: x", "--port: 'x' is not a port"),
        ("enable-prefix-caching: maybe", "write true or false"),
        ("- port", "has no options"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    message = refusal("--config", str(file))
    assert words in message
    assert str(file) in message


def test_a_missing_config_file_is_refused() -> None:
    assert "cannot be read" in refusal("--config", "/nowhere/serve.yaml")


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("CARASERVE_ENABLE_PREFIX_CACHING", "0", "enable_prefix_caching", False),
        ("CARASERVE_SERVED_MODEL_NAME", '["a", "b"]', "served_model_name", ["a", "b"]),
        ("CARASERVE_MODEL", MODEL, "model", Path(MODEL)),
        ("CARASERVE_PORT", "tcp://10.0.0.1:8000", "port", 8000),  # Kubernetes', of a service named caraserve
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True", "allow_runtime_lora_updating", True),
        ("VLLM_LORA_RESOLVER_CACHE_DIR", "/loras", "adapters_dir", Path("/loras")),
        ("NIM_PEFT_SOURCE", "/loras", "adapters_dir", Path("/loras")),
        ("NIM_MAX_LORA_RANK", "32", "max_lora_rank", 32),
    ],
)
def test_variables_set_options(
    variable: str, text: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(parsed(), field) == value


@pytest.mark.parametrize("variable", ["VLLM_API_KEY", "CARASERVE_API_KEY"])
def test_a_key_may_come_from_the_environment_and_help_does_not_show_it(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "sesame")
    assert "sesame" in parsed().api_key
    assert "sesame" not in parser().format_help()


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARASERVE_PORT", "high")
    assert refusal().startswith("CARASERVE_PORT: --port: 'high' is not a port")


def test_a_misspelt_variable_is_noted_and_one_of_kubernetes_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARASERVE_MAX_NUM_SEQ", "2")
    monkeypatch.setenv("CARASERVE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("CARASERVE_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    (note,) = parsed().notes
    assert note.startswith("CARASERVE_MAX_NUM_SEQ has no effect: ")
    assert "CARASERVE_MAX_NUM_SEQS?" in note


# --- the command ---


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["serve", "--help"], ["bench", "--help"], ["bench", "-h"]])
def test_help_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main.main(words)
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert code == 0
    assert printed.out.startswith("usage: caraserve")
    assert printed.err == ""


def test_help_states_each_default_once() -> None:
    text = " ".join(parser().format_help().split())
    assert "(default: the demo) --" in text
    assert "(default: 127.0.0.1)" in text
    assert "(default: None)" not in text
    assert "(default: [])" not in text


def test_help_states_the_default_of_every_number_and_names_its_unit() -> None:
    """Numbers whose default depends on the machine have it in their text."""
    takes = [action for action in parser()._actions if action.nargs != 0 and action.choices is None]
    assert [action.dest for action in takes if "_" in (action.metavar or action.dest)] == []
    numbers = {"TOKENS", "N", "SIZE", "MB", "MS", "SECONDS", "SHARE", "RANK", "LIST"}
    unsaid = [
        action.option_strings[0]
        for action in takes
        if action.metavar in numbers and action.default is None and "default" not in (action.help or "")
    ]
    assert unsaid == []


def test_help_states_the_defaults_that_the_backends_use() -> None:
    text = " ".join(parser().format_help().split())
    assert f"at most {backend_factory._DEFAULT_CONTEXT_TOKENS})" in text
    assert f"(default: {backend_factory._CPU_SEQS}, on a GPU {backend_factory._GPU_SEQS})" in text
    assert f"(default: {backend_factory._CPU_STEP_TOKENS}, on a GPU {backend_factory._GPU_STEP_TOKENS})" in text
    most_gib = backend_factory._KV_MOST_BYTES >> 30
    assert f"{backend_factory._KV_SHARE:.0%} of the free memory, at most {most_gib}GiB".replace("%", " %") in text


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["servee"], 2, "'servee' (choose from"),
        (["serve", "--max-lora", "3"], 2, "caraserve: unknown option --max-lora; did you mean --max-loras?"),
        (
            ["serve", "meta-llama/Llama-3.1-8B", "--port", "0"],
            1,
            "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B",
        ),
    ],
    ids=["command", "option", "hub model"],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    words: list[str], code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_prompts_lack_unused_tools_only_where_the_operator_asks() -> None:
    for words, expected in (([], False), (["--exclude-tools-when-tool-choice-none"], True)):
        config = ModelConfig.from_args(parser().parse_args([MODEL, *words]))
        assert config.exclude_tools_when_tool_choice_none is expected
