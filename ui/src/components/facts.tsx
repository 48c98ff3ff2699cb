/** Facts: names with their values, one under the other. A value that is null, undefined or false is left out. */
import { Fragment, type ComponentChildren } from "preact";

export function Facts({ of }: { of: readonly (readonly [string, ComponentChildren])[] }) {
  const known = of.filter(([, value]) => value !== null && value !== undefined && value !== false);
  return (
    <dl class="facts">
      {known.map(([name, value], n) => (
        <Fragment key={n}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </Fragment>
      ))}
    </dl>
  );
}
