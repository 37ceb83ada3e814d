"""Broken references: what a cross-check of a domain document found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Broken:
    """One reference or sum of a document that does not hold.

    id: stable, for tests and documentation. subject: the element, in the user's words.
    """

    id: str
    subject: str
    expected: str
    observed: str

    def __str__(self) -> str:
        return f"{self.subject}: expected {self.expected}, found {self.observed} ({self.id})"
