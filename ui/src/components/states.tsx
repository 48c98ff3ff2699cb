/** States: what stands in the place of data that is not there: being loaded, refused, or empty. */
import type { ComponentChildren } from "preact";
import { number } from "../lib/format";
import type { Resource } from "../lib/resource";

export function Loading() {
  return (
    <p class="state" role="status">
      Loading …
    </p>
  );
}

export function Failure({ error, retry }: { error: Error; retry?: () => void }) {
  return (
    <div class="state failure" role="alert">
      <p>{error.message}</p>
      {retry && <button onClick={retry}>Try again</button>}
    </div>
  );
}

export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="state">{children}</p>;
}

/** What a list leaves out: nothing is cut without a word. */
export function NotShown({ count, what }: { count: number; what: string }) {
  return count > 0 ? (
    <span class="hint">
      {number(count)} more {what} are not shown.
    </span>
  ) : null;
}

/** Data with its states. A failure to load newer data stands above those of before. */
export function Loaded<T>(props: { of: Resource<T>; children: (data: T) => ComponentChildren }) {
  const { data, error, reload } = props.of;
  if (data === undefined) return error ? <Failure error={error} retry={reload} /> : <Loading />;
  return (
    <>
      {error && <Failure error={error} retry={reload} />}
      {props.children(data)}
    </>
  );
}
