"""What only a checkout has is refused elsewhere, in one line that says what to do."""

from pathlib import Path

import pytest

from caraserve.bench.checkout import laboratory, laboratory_file
from caraserve.errors import ConfigError


def test_an_experiment_that_is_not_installed_is_refused_with_the_command_to_run_in_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()  # another package of this name may be there
    with pytest.raises(ConfigError) as caught:
        laboratory("papers.command", "paper toppings --figure 6", tmp_path)
    assert caught.value.message == (
        "bench paper toppings --figure 6 is not in the installed package; in a checkout of the repository run "
        "`pip install --editable .` and then `caraserve bench paper toppings --figure 6`"
    )
    assert laboratory("papers.command", "paper").__name__ == "scripts.laboratory.papers.command"


def test_a_file_that_is_not_installed_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sample\.gz is not in .* package; name one, or run in a checkout"):
        laboratory_file("sample.gz", "name one", tmp_path)
