"""Vantage: the machine or guest in which the suite ran."""

from enum import StrEnum


class Vantage(StrEnum):
    """Names of the places, as options and stored runs spell them."""

    GUEST = "guest"
    HOST = "host"
    JOB = "job"
