"""What all sections share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)
