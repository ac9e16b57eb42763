"""The co-location lab: measures how jobs share one device (docs/measure.md)."""
