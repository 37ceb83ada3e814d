"""A domain on its host: pins, memory, limits and settings that cost it something."""
