/** Histogram: counts of values as bars. A range is chosen by dragging over them. */
import { useState } from "preact/hooks";
import { compact, number } from "../lib/format";

export interface HistogramData {
  edges: number[];
  counts: number[];
  missing?: number;
  every?: number; // it counted about every so many-th run
  least?: number | null;
  most?: number | null;
}

export function Histogram(props: {
  name: string;
  data: HistogramData;
  /** `last`: `most` is in the range, and not the first value above it. */
  onRange?: (least: number, most: number, last: boolean) => void;
}) {
  const { name, data, onRange } = props;
  const [drag, setDrag] = useState<[number, number] | null>(null);
  const { edges, counts } = data;
  if (!counts.length) return <p class="hint">{name}: no values</p>;
  const most = Math.max(...counts, 1);
  const [low, high] = [data.least ?? edges[0]!, data.most ?? edges.at(-1)!];
  const range = low === high ? `all ${number(low)}` : `${number(low)} – ${number(high)}`;
  const at = (event: PointerEvent) => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    return Math.min(counts.length - 1, Math.max(0, Math.floor(share * counts.length)));
  };
  const label = `${name}: ${compact(counts.reduce((a, b) => a + b, 0))} values, ${range}`;
  const [from, to] = drag ? [Math.min(...drag), Math.max(...drag)] : [0, -1];
  return (
    <figure style={{ margin: "0 0 0.6rem" }}>
      <figcaption class="row">
        <b>{name}</b>
        <span class="spacer" />
        <span class="hint">
          {range}
          {data.missing ? `, ${compact(data.missing)} without` : ""}
          {(data.every ?? 1) > 1 ? `, of 1 in ${data.every}` : ""}
        </span>
      </figcaption>
      <svg
        class="histogram"
        viewBox={`0 0 ${counts.length} 20`}
        preserveAspectRatio="none"
        role="img"
        aria-label={label}
        onPointerDown={(event) => {
          if (!onRange) return;
          (event.currentTarget as Element).setPointerCapture(event.pointerId);
          setDrag([at(event), at(event)]);
        }}
        onPointerMove={(event) => drag && setDrag([drag[0], at(event)])}
        onPointerUp={() => {
          const last = to === counts.length - 1;
          if (drag) onRange?.(edges[from] ?? low, last ? high : (edges[to + 1] ?? high), last);
          setDrag(null);
        }}
      >
        {counts.map((count, n) => (
          <rect
            key={n}
            class="count"
            x={n + 0.08}
            width={0.84}
            y={20 - (18 * count) / most - (count ? 0.8 : 0)}
            height={(18 * count) / most + (count ? 0.8 : 0)}
          >
            <title>{`${low === high ? number(low) : `${number(edges[n])} to ${number(edges[n + 1])}`}: ${number(count)}`}</title>
          </rect>
        ))}
        {drag && <rect class="chosen" x={from} width={to - from + 1} y={0} height={20} />}
      </svg>
    </figure>
  );
}
