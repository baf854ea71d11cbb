"""Packages for tests come from where pip's settings say, also where uv installs them."""

import pytest

from scripts.uv_install import variables


def test_pips_settings_become_uvs_and_those_of_the_environment_come_last() -> None:
    settings = (
        ":env:.find-links='/wheels'\n"
        ":env:.timeout='60'\n"
        "global.extra-index-url='file:///a file:///b'\n"
        "global.find-links='/elsewhere'\n"
        "install.index-url='https://index.example/simple'\n"
        "wheel.no-binary='numpy'\n"
    )
    assert variables(settings) == {
        "UV_FIND_LINKS": "/wheels",
        "UV_INDEX": "file:///a file:///b",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
    }


def test_a_setting_without_counterpart_leaves_the_packages_to_pip() -> None:
    with pytest.raises(SystemExit, match="only-binary"):
        variables("global.only-binary=':all:'\n")
