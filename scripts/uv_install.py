"""Installs into this environment with uv, in a third of the time that pip takes: python scripts/uv_install.py ARGUMENTS

uv does not read pip's settings, so those that say where packages come from are passed on. Fails, for its caller to use
pip, where there is one that is not known here.
"""

import ast
import os
import subprocess
import sys

# Settings of pip, their variables for uv and what separates several values.
_PASSED_ON = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", ""),
}
_WITHOUT_EFFECT = {"default-timeout", "timeout", "retries", "disable-pip-version-check", "no-input", "progress-bar",
                   "require-virtualenv", "root-user-action", "cache-dir", "quiet", "no-color"}  # fmt: skip


def variables(settings: str) -> dict[str, str]:
    """Returns uv's variables for what `pip config list` printed."""
    chosen: dict[str, str] = {}
    for wanted in ("global", "install", ":env:"):  # pip takes the last one, too
        for line in settings.splitlines():
            name, _, value = line.partition("=")
            section, _, key = name.rpartition(".")
            if section != wanted or key in _WITHOUT_EFFECT:
                continue
            if key not in _PASSED_ON:
                sys.exit(f"pip's setting {key} is not known")
            chosen[key] = ast.literal_eval(value)
    return {_PASSED_ON[key][0]: _PASSED_ON[key][1].join(value.split()) for key, value in chosen.items()}


def main() -> None:
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    # As pip does: the newest release that any index has.
    environment = {"UV_INDEX_STRATEGY": "unsafe-best-match", **os.environ, **variables(settings)}
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-config", "--python", sys.executable]
    sys.exit(subprocess.run(command + sys.argv[1:], env=environment).returncode)


if __name__ == "__main__":
    main()
