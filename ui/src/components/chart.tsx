/** Chart: curves over a common axis, drawn by uPlot on a canvas. The value at the pointer stands in its title.
 *
 * Dragging zooms, a double click shows all again.
 */
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { brief, number, time } from "../lib/format";
import { theme } from "../lib/theme";

/** Distances of marks on an axis of steps, iterations or tasks. */
const WHOLE = [1, 2, 5].flatMap((n) => Array.from({ length: 8 }, (_, power) => n * 10 ** power)).sort((a, b) => a - b);

const DAY = 86_400; // seconds

/** Return the range of an axis with a single point, which stands in the middle. */
function alone(points: ChartProps["points"], step: number): { range?: [number, number] } {
  const [x] = points[0] ?? [0];
  return points.length === 1 ? { range: [x - step, x + step] } : {};
}

/** Return the width of an axis whose longest label is not cut. */
function widthOf(plot: uPlot, labels: string[] | null): number {
  const context = plot.ctx;
  context.save();
  context.font = plot.axes[1]!.font![0]!;
  const widest = Math.max(0, ...(labels ?? []).map((label) => context.measureText(label).width));
  context.restore();
  return Math.max(60, widest / devicePixelRatio + 16);
}

export interface ChartProps {
  title: string;
  points: readonly (readonly [number, number])[];
  axis: string;
  /** A value to reach, drawn as a dashed line. */
  limit?: number;
  /** The axis is of unix seconds, written as dates and times. */
  clock?: boolean;
  /** Equal factors are equally far from each other. */
  logarithmic?: boolean;
}

export function Chart({ title, points, axis, limit, clock = false, logarithmic }: ChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const value = useRef<HTMLSpanElement>(null);
  const last = points.length ? `last ${brief(points.at(-1)![1])}` : "no data";
  const colours = theme.value;
  useEffect(() => {
    const element = box.current;
    if (!element || !points.length) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name: string) => style.getPropertyValue(name).trim();
    const axes = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const plot = new uPlot(
      {
        width: element.clientWidth,
        height: 160,
        scales: { x: { time: clock, ...alone(points, clock ? DAY : 1) }, y: logarithmic ? { distr: 3 } : {} },
        series: [
          { label: axis },
          { label: title, stroke: colour("--accent"), width: 1.5, spanGaps: false },
          { label: "limit", stroke: colour("--good"), width: 1.5, dash: [6, 4], points: { show: false } },
        ].slice(0, limit === undefined ? 2 : 3),
        axes: [
          clock ? { ...axes, size: 40 } : { ...axes, size: 30, incrs: WHOLE, label: axis, labelSize: 16, labelGap: 0 },
          { ...axes, size: widthOf, values: (_: uPlot, splits: (number | null)[]) => splits.map((y) => (y === null ? "" : number(y))) },
        ],
        legend: { show: false },
        cursor: { drag: { x: true, y: false } },
        hooks: {
          setCursor: [
            ({ cursor: { idx } }: uPlot) => {
              const point = idx === null || idx === undefined ? undefined : points[idx];
              const at = point && (clock ? time(point[0]) : `${axis} ${number(point[0])}`);
              if (value.current) value.current.textContent = point ? `${at}: ${brief(point[1])}` : last;
            },
          ],
        },
      },
      [
        points.map(([x]) => x),
        points.map(([, y]) => y),
        ...(limit === undefined ? [] : [points.map(() => limit)]),
      ],
      element,
    );
    const watcher = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: 160 }));
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      plot.destroy();
    };
  }, [points, colours, limit, clock, logarithmic]);
  const values = points.map(([, y]) => y);
  const text = points.length
    ? `${title}: ${points.length} points from ${number(values[0])} to ${number(values.at(-1))}`
    : `${title}: no data`;
  return (
    <figure style={{ margin: 0 }}>
      <figcaption>
        <b>{title}</b> <span class="hint" ref={value}>{last}</span>
      </figcaption>
      <div ref={box} role="img" aria-label={text} />
    </figure>
  );
}
