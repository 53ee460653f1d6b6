from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "MEGAGENT_WEBSHOP_DATA"


def item(asin: str, **fields: Any) -> dict[str, Any]:
    """A valid product record in the original's schema, with `fields` instead of its own."""
    return {
        "asin": asin,
        "name": "Blue Cotton Shirt",
        "full_description": "A shirt.",
        "small_description": ["washable", "light"],
        "pricing": "$10.5",
        "images": ["none"],
        "product_category": "Clothing \u203a Shirts",
        "category": "fashion",
        "query": " Shirts ",
        "customization_options": {"Size": [{"value": " Small "}, {"value": "W/L"}], "Fit": None},
        **fields,
    }


def entry(**fields: Any) -> dict[str, Any]:
    """A valid attributes entry with an instruction."""
    asked = {"instruction": "Find me washable shirts", "instruction_attributes": ["washable"]}
    return {"attributes": ["washable", "light"], **asked, **fields}


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real products; tests that need it are skipped where it is not."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} does not name the folder of the 1,000 real products")
    return Path(folder)
