"""The directory in which tests act as several users."""

from tests.ordinary_user import place

__all__ = ["place"]
