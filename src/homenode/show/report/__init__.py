"""Page: the report as one self-contained file: its values, its pictures, its templates."""
