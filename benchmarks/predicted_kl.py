"""How well summed damages predict the KL of whole plans, before and after the correction.

    python benchmarks/predicted_kl.py sensitivity.json MODEL --data calib.jsonl --bits 4.4 4.75 5.25 6 7

Measures exact plans at --bits as a whole, on the text of the analysis; predicts each by its sum, and by a correction
fitted to the plans at --fit-bits, which are none of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from qtool.quant.calibration import calibration_set
from qtool.quant.device import resolve_device
from qtool.quant.hub import resolve_model
from qtool.sensitivity.allocate import Limits, allocate
from qtool.sensitivity.record import Sensitivity
from qtool.sensitivity.verify import fit_correction, joint_measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sensitivity", type=Path)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, help="as in `qtool analyze`")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--bits", type=float, nargs="+", default=[4.4, 4.75, 5.25, 6.0, 7.0])
    parser.add_argument("--fit-bits", type=float, nargs="+", default=[4.3, 4.6, 5.0, 5.6, 6.5, 7.5])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()

    sensitivity = Sensitivity.load(args.sensitivity)
    folder = resolve_model(args.model)
    text = calibration_set(folder, data=args.data, num_sequences=args.samples, seq_len=args.seq_len, seed=0)
    plans = {bits: allocate(sensitivity, Limits(avg_bits=bits)) for bits in {*args.bits, *args.fit_bits}}
    measure = joint_measure(folder, text.tokens, resolve_device(args.device), rounding=sensitivity.rounding)
    kl = dict(zip(plans, measure([p.plan for p in plans.values()]), strict=True))
    correction = fit_correction([(plans[bits].damage, kl[bits]) for bits in args.fit_bits])
    print(f"correction: KL = {correction.scale:.4g} x sum^{correction.exponent:.4g}\n")
    fitted = ", ".join(f"{bits:g}: {plans[bits].damage:.4f} -> {kl[bits]:.4f}" for bits in sorted(args.fit_bits))
    print(f"fitted to (bits: sum -> KL) {fitted}\n")
    print("| bits | sum of damages | error | corrected | error | measured KL |\n|---|---|---|---|---|---|")
    for bits in sorted(args.bits):
        plan, measured = plans[bits], kl[bits]
        predicted = correction.kl(plan.damage)
        print(
            f"| {plan.average_bits:.2f} | {plan.damage:.4f} | {100 * (plan.damage / measured - 1):+.1f} % "
            f"| {predicted:.4f} | {100 * (predicted / measured - 1):+.1f} % | {measured:.4f} |"
        )


if __name__ == "__main__":
    main()
