"""Options and variables of other servers, and their meaning here: data for `options.py`.

`SAME`: other names of our own options. `FLAGS`: options that change nothing here, or that are not supported; the names
of one entry have the same meaning. `VARIABLES`: environment variables that set an option.
"""

from dataclasses import dataclass
from typing import Literal

from caraserve.config import LEAST_KEEP_ALIVE_S


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of vLLM, SGLang, KServe, NIM or TRL that has no effect here.

    `takes`: nothing (a switch), one value, or several. `values`: those that match what this server does anyway; None:
    all. `note`: why the option is not needed. `instead`: advice for any other value.
    """

    names: tuple[str, ...]
    takes: Literal["nothing", "one", "several"]
    values: tuple[str, ...] | None
    note: str
    instead: str


def _switch(names: str, note: str) -> Flag:
    return Flag(tuple(names.split()), "nothing", None, note, "")


def _any(names: str, note: str, takes: Literal["one", "several"] = "one") -> Flag:
    return Flag(tuple(names.split()), takes, None, note, "")


def _only(names: str, values: str, instead: str, note: str = "it is the default here") -> Flag:
    return Flag(tuple(names.split()), "one", tuple(values.split()), note, instead)


def _refused(names: str, instead: str, takes: Literal["nothing", "one", "several"] = "one") -> Flag:
    return Flag(tuple(names.split()), takes, (), "", instead)


SAME = {
    # vLLM
    "--kv-cache-memory-bytes": "--kv-cache-bytes",
    "--shutdown-timeout": "--drain-timeout",
    "--timeout-keep-alive": "--keep-alive-timeout",
    "--enable-log-requests": "--log-requests",
    "--disable-log-requests": "--no-log-requests",
    "--no-enable-log-requests": "--no-log-requests",
    # KServe's Hugging Face runtime
    "--model-name": "--served-model-name",
    "--model-dir": "--model",
    "--model-id": "--model",
    "--max-length": "--max-model-len",
    "--http-port": "--port",
    # SGLang
    "--model-path": "--model",
    "--lora-paths": "--lora-modules",
    "--max-loras-per-batch": "--max-loras",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--random-seed": "--seed",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-cuda-graph": "--enforce-eager",
}

_ONE_PROCESS = "one process serves one GPU, or the CPU; to use more, start an instance for each with --peers"
_OWN_LOG = "the log is this server's own; see --log-level and --log-format"
_GRAPHS = "graphs are captured where they help; see --enforce-eager"
_TOOLS = "a request's tools and tool_choice decide"
_GRAMMARS = "llguidance enforces schemas, expressions and grammars"
_ROUTES = (
    "one server generates text and answers /v1/embeddings, /v1/classify, /v1/score and /v1/rerank, without an option"
)
_ADAPTER_MEMORY = "adapters are bounded by bytes, not by number: see --max-host-adapters-bytes"
_CORS = "--allowed-origins alone decides"

FLAGS = (
    # LoRA
    _switch("--enable-lora", "adapters are always served"),
    _any("--max-cpu-loras --max-loaded-loras", _ADAPTER_MEMORY),
    _any("--lora-target-modules", "every adapter is applied to all modules that it was trained for", "several"),
    _any("--lora-extra-vocab-size", "adapters that add tokens are refused one by one"),
    _any("--lora-backend --max-lora-chunk-size", "the same kernels serve any mix of ranks; see --lora-kernel"),
    _any("--lora-eviction-policy", "adapters leave a cache by how often they are requested and how long a load takes"),
    _switch("--fully-sharded-loras", "an adapter is on one device, so there is nothing to shard"),
    _switch("--specialize-active-lora", "each adapter of a batch costs its own rank only"),
    _switch("--enable-lora-bias", "adapters with a bias of B are always served"),
    _switch("--enable-lora-overlap-loading", "other requests go on while an adapter loads; see --loading-mode"),
    _switch("--lora-strict-loading", "adapters that cannot be applied exactly are always refused"),
    # Which model
    _switch("--trust-remote-code", "code of a checkpoint is never run; models that need it are refused"),
    _any("--download-dir --hf-token", "nothing is downloaded"),
    _any("--code-revision", "code of a checkpoint is never run"),
    _only("--revision --tokenizer-revision", "main", "a local folder has one revision; fetch it with "
          "`hf download MODEL --revision REVISION --local-dir DIR` and serve DIR"),
    _refused("--tokenizer --hf-config-path", "tokenizer and config.json are read from the model's folder"),
    _refused("--hf-overrides --rope-scaling --rope-theta", "edit config.json in the model's folder"),
    _only("--quantization -q", "none None null compressed-tensors gptq gptq_marlin awq awq_marlin gguf mxfp4",
          "weights are not quantised at the start; leave the option out for a checkpoint that is quantised already",
          "the checkpoint's files say how it is quantised"),
    _only("--tokenizer-mode", "auto hf fast", "only tokenizer.json is read"),
    _only("--config-format", "auto hf", "only config.json is read"),
    _any("--model-impl --vllm-model-impl", "there is one implementation"),
    _only("--task --runner", "auto generate text-generation text_generation embed embedding score "
          "classify pooling", f"reward models and transcription are not served; {_ROUTES}", _ROUTES),
    _only("--convert", "auto none embed classify", f"reward models are not served; {_ROUTES}", _ROUTES),
    _only("--backend", "auto vllm", "this server computes the model itself, by no other library: leave the option out"),
    _only("--generation-config", "auto", "defaults of sampling are those of generation_config.json; send others with "
          "each request"),
    _refused("--override-generation-config", "edit generation_config.json, or send the fields with each request"),
    _any("--limit-mm-per-prompt", "requests with images are refused, and models with images are served for text"),
    # Devices, memory, batches
    _only("--tensor-parallel-size -tp --tp --tp-size --pipeline-parallel-size -pp --pp-size --data-parallel-size -dp "
          "--dp-size --data-parallel-size-local --nnodes --api-server-count --prefill-context-parallel-size "
          "--decode-context-parallel-size", "1", _ONE_PROCESS, "it is the only size here"),
    _any("--distributed-executor-backend", "one process serves"),
    _switch("--worker-use-ray --enable-expert-parallel --disable-custom-all-reduce --disable-frontend-multiprocessing "
            "--async-scheduling", "one process serves, and schedules a batch while the one before runs"),
    _any("--compilation-config -O --optimization-level --max-seq-len-to-capture --cuda-graph-sizes --cuda-graph-max-bs",
         _GRAPHS),
    _switch("--enable-chunked-prefill", "prompts are always computed in chunks, see --max-num-batched-tokens"),
    _any("--attention-backend", "one set of kernels attends for every model"),
    _any("--num-scheduler-steps", "requests join and leave at every iteration"),
    _any("--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold",
         "prompts of any number share the tokens of an iteration, see --max-num-batched-tokens"),
    _any("--block-size", "a KV block always has 16 tokens"),
    _any("--swap-space", "a preempted request is computed again, not swapped"),
    _any("--prefix-caching-hash-algo", "blocks of equal prefixes are found by the server's own hash"),
    _only("--cpu-offload-gb", "0 0.0", "weights stay on their device"),
    _refused("--num-gpu-blocks-override", "use --kv-cache-bytes"),
    _refused("--kv-transfer-config", "one instance does prefill and decode"),
    _only("--scheduling-policy --schedule-policy", "fcfs", "tenants take turns; of a user's requests those with a "
          "lower `priority` go first, then those that came first", "tenants take turns; of a user's requests the first "
          "goes first, unless they have a `priority`"),
    _any("--speculative-config", "answers are the same with any; see --num-speculative-tokens"),
    # API
    _any("--reasoning-parser", "the marks of reasoning are those of the model's chat template"),
    _switch("--enable-reasoning", "reasoning is apart from the answer wherever the chat template has marks for it"),
    _any("--tool-parser-plugin", "no code is loaded; see --tool-call-parser for the formats that are known"),
    _any("--guided-decoding-backend --structured-outputs-config", _GRAMMARS),
    _switch("--enable-auto-tool-choice", _TOOLS),
    _only("--max-logprobs", " ".join(map(str, range(101))), "at most 100 are served, 20 to tokens of an answer",
          "up to 20 are served, to tokens of a prompt up to 100"),
    _only("--response-role", "assistant", "the role is always assistant"),
    _only("--chat-template-content-format", "auto string", "templates get text"),
    _refused("--default-chat-template-kwargs", "send chat_template_kwargs with each request"),
    _switch("--enable-prompt-tokens-details", "usage always has prompt_tokens_details"),
    _switch("--enable-request-id-headers", "every response has the header x-request-id"),
    _switch("--enable-server-load-tracking", "/load is always served"),
    _switch("--enable-offline-docs", "/docs needs no other server"),
    _switch("--disable-fastapi-docs", "/docs is always served, and needs a key where clients do"),
    _refused("--enable-force-include-usage --return-tokens-as-token-ids", "clients ask for it in the request",
             "nothing"),
    _refused("--root-path --fastapi-root-path", "have the proxy strip the prefix"),
    _refused("--uds", "use --host and --port"),
    _refused("--middleware", "put a proxy in front"),
    _any("--allowed-methods --allowed-headers", _CORS, "several"),
    _switch("--allow-credentials", _CORS),
    _only("--ssl-cert-reqs", "0 2", "with --ssl-ca-certs a client needs a certificate, without it none"),
    _switch("--enable-ssl-refresh", "a certificate is always read again when its file changes"),
    # Log and traces
    _switch("--disable-uvicorn-access-log", "the log has one line for each request; --no-log-requests turns it off"),
    _switch("--enable-log-outputs --enable-log-deltas", "the log never has the text of answers"),
    _switch("--disable-log-stats", "statistics are at /metrics, not in the log"),
    _any("--uvicorn-log-level --log-config-file --max-log-len --disable-access-log-for-endpoints --log-level-http",
         _OWN_LOG),
    _switch("--enable-metrics", "/metrics is always served"),
    _refused("--otlp-traces-url", "use --otlp-traces-endpoint"),
)  # fmt: skip

VARIABLES = {
    "VLLM_API_KEY": "--api-key",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "--allow-runtime-lora-updating",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "--adapters-dir",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "--keep-alive-timeout",
    "NIM_PEFT_SOURCE": "--adapters-dir",
    "NIM_MAX_LORA_RANK": "--max-lora-rank",
    "NIM_MAX_GPU_LORAS": "--max-loras",
    "NIM_MAX_CPU_LORAS": "--max-cpu-loras",
    "NIM_MAX_MODEL_LEN": "--max-model-len",
    "NIM_SERVED_MODEL_NAME": "--served-model-name",
    "NIM_SERVER_PORT": "--port",
}
# What our own option's least value is, where other servers have a smaller default: a smaller value has no effect.
VARIABLE_LEAST = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": LEAST_KEEP_ALIVE_S}
VARIABLE_NOTES = {
    "NIM_PEFT_REFRESH_INTERVAL": "--adapters-dir is looked at every second, and changes count within about three",
}
