/** Screens: one file each, loaded when first opened. A new screen needs its entry here, and no more.
 *
 * `name` is the first word of its URL, `#/name/...`. The other words come as `path`, the parameters as `params`.
 */
import type { Screen } from "../lib/screen_list";

export type { ScreenProps } from "../lib/screen_list";

export const SCREENS: readonly Screen[] = [
  { name: "overview", title: "Overview", role: "use", menu: true, load: () => import("./overview") },
  { name: "runs", title: "Runs", role: "train", menu: true, load: () => import("./runs") },
  { name: "tasks", title: "Tasks", role: "train", menu: true, load: () => import("./tasks") },
  { name: "run", title: "Run", role: "use", menu: false, load: () => import("./run") },
  { name: "loop", title: "Loop", role: "train", menu: false, load: () => import("./loop") },
  { name: "iteration", title: "Iteration", role: "train", menu: false, load: () => import("./iteration") },
  { name: "dataset", title: "Datasets", role: "train", menu: true, load: () => import("./dataset") },
  { name: "batch", title: "Batches", role: "use", menu: true, load: () => import("./batch") },
  { name: "job", title: "Job", role: "train", menu: false, load: () => import("./job") },
  { name: "keys", title: "Keys and usage", role: "use", menu: true, load: () => import("./keys") },
  { name: "models", title: "Models", role: "use", menu: true, load: () => import("./models") },
  { name: "compare", title: "Compare", role: "use", menu: true, load: () => import("./compare") },
  { name: "playground", title: "Playground", role: "use", menu: true, load: () => import("./playground") },
  { name: "search", title: "Search", role: "train", menu: true, load: () => import("./search") },
];
