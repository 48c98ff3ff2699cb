/** Run list: the runs that were listed last, for "next run" and "previous run" in the viewer. */
import { signal } from "@preact/signals";
import { go, href } from "./route";

export const listed = signal<readonly string[]>([]);
/** The list goes on behind these. */
export const listedMore = signal(false);

/** Open a run of a training set, unless it is a demonstration, which has no page. */
export function openRun(id: string | undefined): void {
  if (id !== undefined && !isDemonstration(id)) go(href(["run", id]));
}

export const isDemonstration = (id: string): boolean => id.startsWith("demonstration/");

/** Open the run so many places after this one in the list. */
export function openNeighbour(id: string, step: number): void {
  const list = listed.peek();
  const at = list.indexOf(id);
  const next = at < 0 ? undefined : list[at + step];
  if (next) go(href(["run", next]));
}
