"""Charts: small SVG pictures of figures: bars, curves, heat maps, effects, paths."""
