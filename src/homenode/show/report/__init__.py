"""Page: the report as one self-contained file: values, pictures and templates."""
