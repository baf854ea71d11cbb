"""Bodies of requests: their JSON, the fields that each route takes, and what the fields say of an answer.

From the bottom: `json_reader` parses; `field_types` reads typed values; `fields` has one entry for each field;
`known_fields` checks names by the tables of `request_schema` and `translated_schema`; `sampling` and `limits` read the
fields that many routes share.
"""
