"""Signatures of requests between instances: keys, covered fields, and how long they are valid."""

import pytest

from caraserve.cluster.membership.auth import Keyring, is_signed_request, sign_request

OLD, NEW = b"the old secret of this cluster", b"the new secret of this cluster"
KEYS = Keyring((OLD,))
NOW_S = 1_800_000_000.0
SIGNED = sign_request(KEYS, "GET", "/cluster/x?a=1", NOW_S)


@pytest.mark.parametrize("later_s", [-29.0, 0.0, 29.0])
def test_a_signature_is_valid_for_half_a_minute_by_either_clock(later_s: float) -> None:
    assert is_signed_request(KEYS, SIGNED, "GET", "/cluster/x?a=1", NOW_S + later_s)


@pytest.mark.parametrize("later_s", [-31.0, 31.0])
def test_a_signature_is_not_valid_after_half_a_minute(later_s: float) -> None:
    assert not is_signed_request(KEYS, SIGNED, "GET", "/cluster/x?a=1", NOW_S + later_s)


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/cluster/x?a=1"), ("GET", "/cluster/x?a=2"), ("GET", "/cluster/x")]
)
def test_a_signature_is_valid_for_one_request_only(method: str, path: str) -> None:
    assert not is_signed_request(KEYS, SIGNED, method, path, NOW_S)


def test_of_several_secrets_the_first_signs_and_all_verify() -> None:
    both = Keyring((NEW, OLD))
    assert is_signed_request(both, SIGNED, "GET", "/cluster/x?a=1", NOW_S)
    assert not is_signed_request(KEYS, sign_request(both, "GET", "/", NOW_S), "GET", "/", NOW_S)


@pytest.mark.parametrize(
    "value", ["", " ", "1", "x y", "9" * 30 + " a", f"{int(NOW_S * 1000)} é", f"{int(NOW_S * 1000)} "]
)
def test_malformed_signatures_are_not_valid(value: str) -> None:
    assert not is_signed_request(KEYS, value, "GET", "/", NOW_S)
