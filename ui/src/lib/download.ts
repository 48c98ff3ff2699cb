/** Download: an answer of the gateway as a file, with the page's key. */
import { request } from "./api";

/** Fetch a path and have the browser save it under this name. Throws ApiError. */
export async function download(path: string, name: string): Promise<void> {
  const response = await request("GET", path, undefined, undefined, "*/*");
  const address = URL.createObjectURL(await response.blob());
  const link = document.createElement("a");
  link.href = address;
  link.download = name.replace(/[^\w.@-]/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
