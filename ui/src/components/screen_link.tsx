/** Screen link: a link to a screen for those who may see it; for others, and where it is not built, its text. */
import type { ComponentChildren } from "preact";
import { oneLine } from "../lib/format";
import { href, type Params } from "../lib/route";
import { isDemonstration } from "../lib/run_list";
import { screens } from "../lib/screen_list";
import { may } from "../lib/session";

export function ScreenLink(props: { to: readonly string[]; params?: Params; children: ComponentChildren }) {
  const screen = screens.value.find((one) => one.name === props.to[0]);
  if (!screen || !may(screen.role)) return <span>{props.children}</span>;
  return <a href={href(props.to, props.params)}>{props.children}</a>;
}

/** A run of a training set. A demonstration is none: it has no page of its own. */
export function RunLink({ id }: { id: string }) {
  if (isDemonstration(id)) return <span>{oneLine(id, 60)}</span>;
  return <ScreenLink to={["run", id]}>{oneLine(id, 60)}</ScreenLink>;
}
