"""Published evidence: figures that others have printed, as data, with sources and doubts."""
