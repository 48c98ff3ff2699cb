/** Spark: a small curve of values in [0, 1], with its figures as text for those who do not see it. */
import { percent } from "../lib/format";

export function Spark({ values, label }: { values: readonly number[]; label: string }) {
  const width = Math.max(values.length - 1, 1);
  const points = values.map((value, n) => `${n},${(1 - Math.min(1, Math.max(0, value))) * 10}`).join(" ");
  const text = `${label}: ${values.length ? `${percent(values[0])} to ${percent(values.at(-1))}` : "no values"}`;
  return (
    <svg class="spark" viewBox={`0 -0.5 ${width} 11`} preserveAspectRatio="none" role="img" aria-label={text}>
      {values.length === 1 ? <line class="line" x1="0" x2="1" y1={points.split(",")[1]} y2={points.split(",")[1]} /> : <polyline class="line" points={points} />}
    </svg>
  );
}
