"""Limits of the chat templates that adapters have of their own."""

COMPILE_CPU_S = 2.0  # 64 KiB take up to 1 s
RENDER_CPU_S = 0.5  # 4,096 messages take a tenth of it
ANSWER_S = 30.0  # until a template must have been compiled and rendered, on a machine that is busy
MAX_PROCESS_BYTES = 512 << 20  # that renderings may take
MAX_TEXT_CHARACTERS = 4 << 20  # of the messages, which are copied in 4 ms
MAX_COMPILED_CHARACTERS = 2 << 20  # of templates that are kept compiled, at 80 bytes or so for each
MAX_TEMPLATES = 1024  # whose formats are known; of these as of the compiled ones, the least recently used is dropped
