from __future__ import annotations

import pytest

import flashvar
from flashvar import errors

CLASSES = [one for one in vars(errors).values() if isinstance(one, type)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_a_public_flashvar_error(kind: type[Exception]) -> None:
    assert issubclass(kind, flashvar.FlashvarError)
    assert getattr(flashvar, kind.__name__) is kind


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.FlashvarError, 1),
        (errors.InvalidInputError, 1),
        (errors.ConfigurationError, 2),
        (errors.ToolchainError, 3),
        (errors.BuildError, 4),
        (errors.PackagingError, 5),
        (errors.AuditError, 6),
        (errors.CheckoutError, 8),
        (errors.ReleaseError, 9),
        (errors.ReproducibilityError, 10),
        (errors.SmokeError, 11),
        (errors.CrossToolchainError, 7),
    ],
)
def test_exit_codes_tell_kinds_apart(kind: type[errors.FlashvarError], code: int) -> None:
    assert kind.exit_code == code


@pytest.mark.parametrize(
    "kind",
    [errors.ShapeError, errors.DtypeError, errors.DeviceError, errors.LayoutError],
)
def test_bad_arguments_are_value_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.InvalidInputError)
    assert issubclass(kind, ValueError)


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = flashvar.atention
