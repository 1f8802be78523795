from __future__ import annotations

import pytest

import flashvar
from flashvar import errors
from flashvar_factory import errors as factory

CLASSES = [one for one in vars(errors).values() if isinstance(one, type)]
OF_FACTORY = [one for one in vars(factory).values() if isinstance(one, type)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_a_public_flashvar_error(kind: type[Exception]) -> None:
    assert issubclass(kind, flashvar.FlashvarError)
    assert getattr(flashvar, kind.__name__) is kind


def test_users_see_their_errors_alone() -> None:
    assert {name for name in flashvar.__all__ if name.endswith("Error")} == {
        kind.__name__ for kind in CLASSES
    }


def test_no_two_kinds_end_with_one_code() -> None:
    own = [one.exit_code for one in {*CLASSES, *OF_FACTORY} if "exit_code" in vars(one)]
    assert sorted(own) == list(range(1, 17))


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.FlashvarError, 1),
        (errors.InvalidInputError, 1),
        (errors.ConfigurationError, 2),
        (factory.ToolchainError, 3),
        (factory.BuildError, 4),
        (factory.PackagingError, 5),
        (factory.AuditError, 6),
        (factory.CheckoutError, 8),
        (factory.ReleaseError, 9),
        (factory.ReproducibilityError, 10),
        (factory.SmokeError, 11),
        (factory.CrossToolchainError, 7),
    ],
)
def test_exit_codes_tell_kinds_apart(kind: type[errors.FlashvarError], code: int) -> None:
    assert kind.exit_code == code


@pytest.mark.parametrize(
    "kind",
    [errors.ShapeError, errors.DtypeError, errors.DeviceError, errors.LayoutError],
)
def test_bad_arguments_are_errors_of_python_and_of_torch(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.InvalidInputError)
    assert issubclass(kind, ValueError)
    assert issubclass(kind, RuntimeError)


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = flashvar.atention
