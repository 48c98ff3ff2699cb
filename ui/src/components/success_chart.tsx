/** Success chart: held-out and test success of a loop by iteration, its target, and others' held-out success. */
import type { components } from "../lib/openapi";
import { percent } from "../lib/format";
import { Chart, type Curve } from "./chart";

type Loop = components["schemas"]["LoopSummary"];

/** Return the loop that changed last, and behind it the control with the longest curve. */
export function chosenLoops(loops: readonly Loop[]): Loop[] {
  const known = loops.filter((one) => one.last && one.holdout.length);
  const chosen = known.find((one) => !one.last!.control) ?? known[0];
  const controls = known.filter((one) => one !== chosen && one.last!.control);
  return chosen ? [chosen, ...controls.sort((a, b) => b.holdout.length - a.holdout.length).slice(0, 1)] : [];
}

export function SuccessChart({ loop, others = [] }: { loop: Loop; others?: readonly Loop[] }) {
  return (
    <Chart
      title="held-out success"
      axis="iteration"
      share
      show={percent}
      points={heldOut(loop)}
      more={[testCurve(loop.holdout), ...others.map((one) => asCurve(one, one.last?.control ? "control " : ""))]}
      limit={loop.last?.target}
      limitName="target"
    />
  );
}

function heldOut({ holdout }: Loop): [number, number][] {
  return holdout.map((one) => [one.iteration, one.success]);
}

/** Return the curve of success at test tasks, which are measured now and then. */
export function testCurve(list: readonly { iteration: number; test?: number | null }[]): Curve {
  return { title: "test success", points: list.flatMap((one): [number, number][] => (one.test == null ? [] : [[one.iteration, one.test]])) };
}

export function asCurve(loop: Loop, before = ""): Curve {
  return { title: before + loop.id, points: heldOut(loop), dashed: !!loop.last?.control };
}
