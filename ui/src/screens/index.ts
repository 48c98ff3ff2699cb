/** Screens: one file each, loaded when first opened. A new screen needs its entry here, and no more.
 *
 * `name` is the first word of its URL, `#/name/...`. The other words come as `path`, the parameters as `params`.
 */
import type { Screen } from "../lib/screen_list";

export type { ScreenProps } from "../lib/screen_list";

export const SCREENS: readonly Screen[] = [
  { name: "overview", title: "Overview", role: "use", menu: true, load: () => import("./overview") },
  { name: "loop", title: "Loops", role: "train", menu: true, opens: "loop", load: () => import("./loop") },
  { name: "iteration", title: "Iteration", role: "train", menu: false, under: "loop", load: () => import("./iteration") },
  { name: "runs", title: "Runs", role: "train", menu: true, load: () => import("./runs") },
  { name: "run", title: "Run", role: "use", menu: false, under: "runs", load: () => import("./run") },
  { name: "tasks", title: "Tasks", role: "train", menu: true, load: () => import("./tasks") },
  { name: "dataset", title: "Datasets", role: "train", menu: true, opens: "dataset", load: () => import("./dataset") },
  { name: "job", title: "Jobs", role: "train", menu: true, opens: "job", load: () => import("./job") },
  { name: "models", title: "Models", role: "use", menu: true, load: () => import("./models") },
  { name: "replica", title: "Replica", role: "admin", menu: false, under: "overview", load: () => import("./replica") },
  { name: "batch", title: "Batches", role: "use", menu: true, opens: "batch", load: () => import("./batch") },
  { name: "keys", title: "Keys and usage", role: "use", menu: true, load: () => import("./keys") },
  { name: "compare", title: "Compare", role: "use", menu: true, load: () => import("./compare") },
  { name: "playground", title: "Playground", role: "use", menu: true, load: () => import("./playground") },
  { name: "search", title: "Search", role: "train", menu: true, load: () => import("./search") },
];
