"""The schemas of benchmarks/structured_outputs.py, for the engines that it compares."""

_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "count": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "description", "count", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _ITEM, "minItems": 100}
_RECORD = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 9},
        "delivery_address_is_confirmed": {"type": "boolean"},
        "preferred_payment_method": {"enum": ["credit card", "bank transfer", "cash on delivery"]},
        "terms_and_conditions_version": {"const": "2026-01"},
    },
    "required": [
        "customer_identification_number",
        "delivery_address_is_confirmed",
        "preferred_payment_method",
        "terms_and_conditions_version",
    ],
    "additionalProperties": False,
}
RECORDS = {"type": "array", "items": _RECORD, "minItems": 100}
"""Long names and few values: most tokens are forced."""
