"""Errors of the package."""

from __future__ import annotations


class Error(Exception):
    """Base of the package's errors: an unknown environment, or one that cannot be made."""


class RegistrationError(Error):
    """An id is registered already."""
