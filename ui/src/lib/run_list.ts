/** Run list: the runs that were listed last, for "next run" and "previous run" in the viewer. */
import { signal } from "@preact/signals";
import { go, href } from "./route";

export const listed = signal<readonly string[]>([]);

/** Open the run so many places after this one in the list. */
export function openNeighbour(id: string, step: number): void {
  const list = listed.peek();
  const at = list.indexOf(id);
  const next = at < 0 ? undefined : list[at + step];
  if (next) go(href(["run", next]));
}
