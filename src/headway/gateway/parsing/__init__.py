"""From the bytes of a request to a `ParsedRequest`: fields, class, SLO, prompt tokens."""
