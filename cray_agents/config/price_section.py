"""The section `[prices]`: what devices and energy cost. Read by runtime/accounting/."""

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat


class PriceSettings(BaseModel):
    """The section `[prices]`: what an hour of a device and energy cost, for `usage cost`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    currency: str = Field("USD", pattern=r"^[A-Z]{3}$", description="of all prices")
    gpu_hour: dict[str, NonNegativeFloat] = Field(
        default_factory=dict,
        description="price of a GPU for an hour by Slurm's type, as {h100 = 2.5}; gpu: any other",
    )
    core_hour: NonNegativeFloat | None = Field(None, description="price of a core for an hour")
    kwh: NonNegativeFloat | None = Field(
        None, description="price of a kWh, for energy that was measured"
    )

    @property
    def known(self) -> bool:
        """At least one price is given."""
        return bool(self.gpu_hour) or self.core_hour is not None or self.kwh is not None

    def of_gpu(self, kind: str) -> float | None:
        """Return the price of a GPU for an hour; None if none is given.

        `kind`: its type or model, as LedgerLine has it. The longest type that is a part of it
        counts, as in Slurm, where `h100` means `nvidia_h100_80gb_hbm3`.
        """
        named = [name for name in self.gpu_hour if name.lower() in kind.lower()]
        return self.gpu_hour[max(named, key=len)] if named else self.gpu_hour.get("gpu")
