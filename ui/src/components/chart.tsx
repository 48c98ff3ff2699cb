/** Chart: curves over a common axis, drawn by uPlot on a canvas. The values at the pointer stand in its title.
 *
 * Dragging zooms, a double click shows all again.
 */
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { brief, number, oneLine, time } from "../lib/format";
import { theme } from "../lib/theme";

/** Distances of marks on an axis of steps, iterations or tasks. */
const WHOLE = [1, 2, 5].flatMap((n) => Array.from({ length: 8 }, (_, power) => n * 10 ** power)).sort((a, b) => a - b);
/** Seconds between marks of time, so close to each other that a chart has one. */
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, ...[1, 2, 3, 6, 12, 24, 48, 168, 336, 720, 1440, 4320, 8760].map((hours) => hours * 3600)];
/** Colours of the curves, in their order; a limit is `good`. */
const TONES = ["accent", "fair", "quiet", "bad", "text"];

const DAY = 86_400; // seconds

type Points = readonly (readonly [number, number])[];

/** How much of the mean of before stays in a smoothed curve at each point. */
const SMOOTHING = 0.9;

/** Return the exponential moving average of a curve at its places; it begins at the first value, not at 0. */
function smoothed(points: Points): Map<number, number> {
  let [sum, weight] = [0, 0];
  return new Map(
    points.map(([x, y]) => {
      sum = SMOOTHING * sum + (1 - SMOOTHING) * y;
      weight = SMOOTHING * weight + (1 - SMOOTHING);
      return [x, sum / weight];
    }),
  );
}

/** Return the range of an axis with a single place, which stands in the middle. */
function alone(places: readonly number[], step: number): { range?: [number, number] } {
  const [x = 0] = places;
  return places.length === 1 ? { range: [x - step, x + step] } : {};
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

export interface Curve {
  title: string;
  points: Points;
  /** Drawn with a broken line. */
  dashed?: boolean;
}

export interface ChartProps extends Curve {
  axis: string;
  /** Further curves over the same axis. */
  more?: readonly Curve[];
  /** A value to reach, drawn as a dashed line, and its name. */
  limit?: number | null;
  limitName?: string;
  /** Write a value with its unit. */
  show?: (value: number) => string;
  /** Values lie in [0, 1], and so does the axis. */
  share?: boolean;
  /** The axis is of unix seconds, written as dates and times. */
  clock?: boolean;
  /** Equal factors are equally far from each other. */
  logarithmic?: boolean;
  /** Draw the curves' moving averages, and what was measured faintly. */
  smooth?: boolean;
}

export function Chart(props: ChartProps) {
  const { title, points, dashed, more = [], axis, limit = null, limitName, show, share, clock = false, logarithmic, smooth = false } = props;
  const box = useRef<HTMLDivElement>(null);
  const value = useRef<HTMLSpanElement>(null);
  const curves: Curve[] = [{ title, points, dashed }, ...more].filter((one, n) => n === 0 || one.points.length);
  const places = [...new Set(curves.flatMap((one) => one.points.map(([x]) => x)))].sort((a, b) => a - b);
  const columns = curves.map((one) => {
    const known = new Map(one.points);
    return places.map((x) => known.get(x) ?? null);
  });
  const means = smooth ? curves.map(({ points }) => smoothed(points)).map((known) => places.map((x) => known.get(x) ?? null)) : [];
  const told = (values: readonly (number | null | undefined)[]) =>
    values
      .map((y, n) => {
        if (y === null || y === undefined) return "";
        return `${curves.length > 1 ? `${oneLine(curves[n]!.title, 40)} ` : ""}${show ? show(y) : brief(y)}`;
      })
      .filter(Boolean)
      .join(", ");
  const last = places.length ? `last ${told(curves.map((one) => one.points.at(-1)?.[1]))}` : "no data";
  const colours = theme.value;
  const drawn = JSON.stringify([curves, limit, smooth]);
  useEffect(() => {
    const element = box.current;
    if (!element || !places.length) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name: string) => style.getPropertyValue(`--${name}`).trim();
    const axes = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
    const labels = (_: uPlot, splits: (number | null)[]) => splits.map((y) => (y === null ? "" : show ? show(y) : number(y)));
    const times = (_: uPlot, splits: number[], _axis: number, _space: number, distance: number) =>
      splits.map((x, n) => {
        const [day, hour] = [time(x).slice(0, 10), time(x).slice(11, distance < 60 ? 19 : 16)];
        if (distance >= DAY) return day;
        return n > 0 && time(splits[n - 1]).startsWith(day) ? hour : `${hour}\n${day}`;
      });
    const plot = new uPlot(
      {
        width: element.clientWidth,
        height: 160,
        padding: clock ? [null, 40, null, null] : undefined, // half a date
        scales: {
          x: { time: clock, ...alone(places, clock ? DAY : 1) },
          y: logarithmic ? { distr: 3 } : share ? { range: [-0.03, 1.03] } : {},
        },
        series: [
          { label: axis },
          ...curves.map((one, n) => ({
            label: one.title,
            stroke: colour(TONES[n % TONES.length]!) + (smooth ? "55" : ""),
            width: 1.5,
            spanGaps: curves.length > 1,
            dash: one.dashed ? [3, 4] : undefined,
          })),
          ...means.map((_, n) => ({ label: "smoothed", stroke: colour(TONES[n % TONES.length]!), width: 2, spanGaps: true, points: { show: false } })),
          ...(limit === null ? [] : [{ label: "limit", stroke: colour("good"), width: 1.5, dash: [6, 4], points: { show: false } }]),
        ],
        axes: [
          { ...axes, label: axis, labelSize: 16, labelGap: 0, ...(clock ? { size: 40, space: 80, incrs: TIMES, values: times } : { size: 30, incrs: WHOLE }) },
          { ...axes, size: widthOf, values: labels },
        ],
        legend: { show: false },
        cursor: { drag: { x: true, y: false } },
        hooks: {
          setCursor: [
            ({ cursor: { idx } }: uPlot) => {
              const x = idx === null || idx === undefined ? undefined : places[idx];
              const at = x !== undefined && (clock ? time(x) : `${axis} ${number(x)}`);
              const mean = means.length ? `, smoothed ${told(means.map((column) => column[idx!]))}` : "";
              if (value.current) value.current.textContent = at ? `${at}: ${told(columns.map((column) => column[idx!]))}${mean}` : last;
            },
          ],
        },
      },
      [places, ...columns, ...means, ...(limit === null ? [] : [places.map(() => limit)])],
      element,
    );
    const watcher = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: 160 }));
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      plot.destroy();
    };
  }, [drawn, colours, clock, logarithmic]);
  const text = curves.map((one) => {
    const [first, end] = [one.points[0]?.[1], one.points.at(-1)?.[1]];
    return `${one.title}: ${one.points.length ? `${one.points.length} points from ${number(first)} to ${number(end)}` : "no data"}`;
  });
  return (
    <figure style={{ margin: 0 }}>
      <figcaption>
        {curves.map((one, n) => (
          <b key={n} class={curves.length > 1 ? `curve ${TONES[n % TONES.length]}` : ""}>
            {oneLine(one.title, 60)}{" "}
          </b>
        ))}
        {limitName && limit !== null && (
          <b class="curve good">
            {limitName} {show ? show(limit) : brief(limit)}{" "}
          </b>
        )}
        <span class="hint" ref={value}>{last}</span>
      </figcaption>
      <div ref={box} role="img" aria-label={text.join("; ")} />
    </figure>
  );
}
