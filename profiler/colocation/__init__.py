"""The co-location lab: what jobs make of a device that they share (docs/measure.md)."""
