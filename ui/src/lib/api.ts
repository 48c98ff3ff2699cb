/** API client: typed calls of the gateway's routes. The types are generated from /openapi.json.
 *
 * A page that has the answers within it puts their source in the gateway's place.
 */
import type { paths } from "./openapi";
import { parseJson } from "./exact_json";
import { clearKey, key } from "./session";

type Verb = "get" | "post" | "delete";
export type PathOf<V extends Verb> = {
  [P in keyof paths]: paths[P] extends { [K in V]: { responses: unknown } } ? P : never;
}[keyof paths];
type Operation<P extends keyof paths, V extends Verb> = paths[P] extends { [K in V]: infer O } ? O : never;
export type Answer<P extends keyof paths, V extends Verb> =
  Operation<P, V> extends { responses: { 200: { content: { "application/json": infer T } } } } ? T : unknown;
type Part<O, In extends "path" | "query"> = O extends { parameters: { [K in In]?: infer T } } ? NonNullable<T> : never;
type Body<O> = O extends { requestBody?: { content: { "application/json": infer T } } } ? T : never;

interface Sent<O> {
  path?: Part<O, "path">;
  query?: Part<O, "query">;
  body?: Body<O>;
  signal?: AbortSignal;
  /** Why a change is made, for the audit log. */
  reason?: string;
}

/** A refusal of the gateway, in its own words. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

/** The gateway's address: this page's folder. */
export const BASE = new URL(".", location.href).href.replace(/\/$/, "");

/** Answers a method of a route, `template`, with the body of the gateway's answer. Throws ApiError. */
export type AnswerSource = (method: string, template: string, sent: AnySent) => Promise<unknown>;
let source: AnswerSource = json;

export function answerFrom(other: AnswerSource): void {
  source = other;
}

export function get<P extends PathOf<"get">>(path: P, sent: Sent<Operation<P, "get">> = {}): Promise<Answer<P, "get">> {
  return source("GET", path, sent) as Promise<Answer<P, "get">>;
}

export function post<P extends PathOf<"post">>(
  path: P,
  sent: Sent<Operation<P, "post">> = {},
): Promise<Answer<P, "post">> {
  return source("POST", path, sent) as Promise<Answer<P, "post">>;
}

export function del<P extends PathOf<"delete">>(
  path: P,
  sent: Sent<Operation<P, "delete">> = {},
): Promise<Answer<P, "delete">> {
  return source("DELETE", path, sent) as Promise<Answer<P, "delete">>;
}

export interface AnySent {
  path?: unknown;
  query?: unknown;
  body?: unknown;
  signal?: AbortSignal;
  reason?: string;
}

async function json(method: string, template: string, sent: AnySent): Promise<unknown> {
  const more: Record<string, string> = sent.reason ? { "x-reason": encodeURIComponent(sent.reason) } : {};
  const path = address(template, sent.path, sent.query);
  const response = await request(method, path, sent.body, sent.signal, "application/json", more);
  return parseJson(await response.text());
}

/** Return the path of a template with its ids and query. A list in the query repeats its name. */
export function address(template: string, ids: unknown = {}, query: unknown = {}): string {
  const path = template.replace(/\{(\w+)\}/g, (_, name: string) =>
    encodeURIComponent(String((ids as Record<string, unknown>)[name])),
  );
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query as Record<string, unknown>)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") search.append(name, String(one));
    }
  }
  const text = search.toString();
  return text ? `${path}?${text}` : path;
}

/** Send a request with the key. Throws ApiError for a refusal, and for a gateway that is not there. */
export async function request(
  method: string,
  path: string,
  body?: unknown,
  signal?: AbortSignal,
  accept = "application/json",
  more: Record<string, string> = {},
): Promise<Response> {
  const headers: Record<string, string> = { accept, ...more };
  const secret = key.peek();
  if (secret) headers.authorization = `Bearer ${secret}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response: Response;
  try {
    response = await fetch(BASE + path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "unreachable", "The gateway does not answer. It is asked again when it is back.");
  }
  if (response.ok) return response;
  const refusal = await refusalOf(response);
  if (response.status === 401) clearKey(refusal.message);
  throw refusal;
}

async function refusalOf(response: Response): Promise<ApiError> {
  let message = `The gateway answered ${response.status}.`;
  let code = "unknown";
  try {
    const { error } = (await response.json()) as { error: { message: string; code: string } };
    message = error.message;
    code = error.code;
  } catch {
    // not an envelope: a proxy answered
  }
  return new ApiError(response.status, code, message);
}
