"""The length forecasts of a gateway."""
