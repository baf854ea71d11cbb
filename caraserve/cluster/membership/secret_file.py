"""The file of shared secrets: one to a line, the first signs, all verify.

To change them without a pause: add the new one everywhere, put it first everywhere, take the old one away. The file is
read again when it changes, as it does when Kubernetes renews a mounted secret.
"""

from pathlib import Path

from caraserve.cluster.membership.auth import Keyring
from caraserve.errors import ConfigError

# Instances on one machine's loopback interface trust whoever can reach it, as they do with requests that need no key.
LOOPBACK_SECRET = b"caraserve: every process of this machine may join"


class SecretFile:
    """The secrets in a file, and whether they are others than before."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when it cannot be read or has no usable secret."""
        self._path = path
        self._lines = self._read()
        self.keys = Keyring(self._lines)

    def reread(self) -> bool:
        """Whether `keys` is new. Raises ConfigError, and keeps the old, when the file is of no use."""
        lines = self._read()
        if lines == self._lines:
            return False
        self.keys, self._lines = Keyring(lines), lines
        return True

    def _read(self) -> tuple[bytes, ...]:
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"--cluster-secret-file {str(self._path)!r}: {error.strerror}") from None
        return tuple(line.strip() for line in lines if line.strip())
