/** Funnel: how many runs a training set considered, took, and left out for each reason. */
import { number, oneLine, percent } from "../lib/format";
import type { components } from "../lib/openapi";
import { ScreenLink } from "./screen_link";

export function Funnel({ dataset, counts }: { dataset: string; counts: components["schemas"]["Funnel"] }) {
  const { considered, accepted } = counts;
  const reasons = Object.entries(counts.rejected).sort(([, one], [, other]) => other - one);
  const rows: [string, number, string, Record<string, string>][] = [
    ["considered", considered, "", {}],
    ["accepted", accepted, "good", { show: "in" }],
    ...reasons.map(([reason, count]): [string, number, string, Record<string, string>] => [reason, count, "bad", { reason }]),
  ];
  if (!considered) return <p class="state">No run was considered: it is made of demonstrations alone.</p>;
  return (
    <dl class="funnel">
      {rows.map(([name, count, tone, params]) => (
        <div key={name}>
          <dt>
            <ScreenLink to={["dataset", dataset]} params={params}>
              {oneLine(name.replace(/_/g, " "), 60)}
            </ScreenLink>
          </dt>
          <dd class="number">{number(count)}</dd>
          <dd class="quiet number">{percent(count / considered)}</dd>
          <dd class={`bar ${tone}`} aria-hidden="true">
            <span style={{ width: `${Math.min(100, (100 * count) / considered)}%` }} />
          </dd>
        </div>
      ))}
    </dl>
  );
}
